"""Costs on CUDA devices: what a device does at best, bounds, and measurements."""
