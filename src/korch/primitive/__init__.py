"""The primitive graph: values, primitives, their semantics and their text form."""
