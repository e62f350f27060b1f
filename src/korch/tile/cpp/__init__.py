"""Tile program -> C++."""
