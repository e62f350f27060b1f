"""Tile program -> Triton. Read `print.py`, then `rows.py`."""
