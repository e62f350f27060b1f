"""Groups -> tile programs: one file per kind of schedule. Read `blocks.py`, then `products.py`."""
