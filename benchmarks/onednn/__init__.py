"""Kernels of the oneDNN library, with which Korch's kernels are compared."""

from benchmarks.onednn.provider import OneDnnProvider

__all__ = ["OneDnnProvider"]
