"""Costs of kernels that are not measured: the features of a candidate, and a learned model of its time."""
