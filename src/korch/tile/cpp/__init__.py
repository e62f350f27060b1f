"""Tile program -> C++. Read `print.py`, then `steps.py`."""
