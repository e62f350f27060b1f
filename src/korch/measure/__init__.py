"""Kernels -> costs: builds kernels, times them, and computes lower bounds. Read `meter.py`, then `cpu.py`."""
