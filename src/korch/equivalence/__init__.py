"""Equivalence rules, and equality saturation, which adds their alternatives to a primitive graph."""
