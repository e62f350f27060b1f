"""Primitive graph -> segments, and which of them are the same block."""
