"""Plan -> executable and artifact. Read `build.py`, then `executable.py`."""
