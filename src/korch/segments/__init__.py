"""Primitive graph -> segments, each searched once per block of equal ones -> the plan of the whole model.

A small model is one segment. Read `segment.py`, then `search.py`.
"""
