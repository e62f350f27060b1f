"""The primitive graph: values, primitives, their semantics and their text form. Read `graph.py`, then `op.py`."""
