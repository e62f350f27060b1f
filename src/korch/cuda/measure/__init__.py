"""Costs on CUDA devices: the best rates of a device, lower bounds, and measurements."""
