"""Kernels -> costs: builds kernels, times them, and computes lower bounds."""
