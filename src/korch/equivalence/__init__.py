"""Primitive graph -> primitive graph with alternatives."""
