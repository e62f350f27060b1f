"""Primitive graph -> segments, with equal segments combined into blocks."""
