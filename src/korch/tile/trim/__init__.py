"""Tile program for the largest size of a range -> one for all sizes, known at run time only. Read `trim.py` first."""
