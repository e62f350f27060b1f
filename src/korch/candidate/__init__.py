"""Primitive graph -> candidates."""
