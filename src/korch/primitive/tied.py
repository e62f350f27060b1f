"""Tied tables: a matrix from whose rows a model gathers some, and which it also multiplies by, transposed.

Language models' tables of embeddings may be such. They are stored once, if no rule changes the one constant.
"""

import numpy as np

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.opaque import OpaqueAttributes

LEAST_BYTES = 1 << 20
"""The smallest table that is stored once."""


def is_transpose(graph: PrimitiveGraph, one: int, other: int) -> bool:
    """Return whether two constants are a matrix and its transpose, besides axes of size 1, bit by bit."""
    sizes, others = ([n for n in graph.types[value].shape if n != 1] for value in (one, other))
    if len(sizes) != 2 or sizes != others[::-1] or graph.types[one].dtype is not graph.types[other].dtype:
        return False
    a, b = (graph.constants[value].array for value in (one, other))
    bits = np.dtype(f"u{a.itemsize}")
    columns, rows = a.reshape(sizes).view(bits), b.reshape(others).view(bits)
    return bool((columns[:, :1] == rows[:1].T).all() and (rows == columns.T).all())


def gathered_tables(graph: PrimitiveGraph) -> set[int]:
    """Return the large constants from which a model gathers rows."""
    found = {
        p.inputs[0]
        for p in graph.primitives
        if isinstance(p.attributes, OpaqueAttributes) and p.attributes.op_type == "Gather" and not p.attributes.domain
    }
    return {value for value in found & graph.constants.keys() if graph.types[value].size_bytes >= LEAST_BYTES}


def tied_constants(graph: PrimitiveGraph) -> frozenset[int]:
    """Return the constants that are transposes of tables from which rows are gathered."""
    tables = gathered_tables(graph)
    return frozenset(value for value in graph.constants for table in tables if is_transpose(graph, value, table))
