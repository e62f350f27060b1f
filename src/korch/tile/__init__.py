"""Tile programs: the form between a candidate and its source code.

`ir/` is their data, `check/` proves and interprets them, `lower/` makes one of a group, `cpp/` and
`triton/` print them. Read `ir/program.py` first.
"""
