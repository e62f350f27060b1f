"""The primitive graph: values, primitives, their meaning, their text."""
