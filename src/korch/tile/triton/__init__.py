"""Tile program -> Triton."""
