"""Primitive graph -> groups -> candidates. Read `candidate.py`, then `enumerate.py`."""
