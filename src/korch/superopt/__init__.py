"""Tile programs found by search: enumerated, pruned and verified."""
