"""Tile programs -> whether they are valid, and what they compute.

`check.py` lists the properties, `places.py` proves bounds and the absence of races, `reference.py` interprets programs.
"""
