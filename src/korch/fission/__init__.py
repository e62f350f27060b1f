"""Operator graph -> primitive graph."""
