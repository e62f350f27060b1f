"""Group of primitives -> tile program. Read `lower.py`, then `staging.py`."""
