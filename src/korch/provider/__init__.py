"""Candidate -> kernel: makers of kernels that compete on equal terms."""
