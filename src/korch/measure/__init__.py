"""Kernels -> costs."""
