"""Kernels of the oneDNN library."""

from korch.provider.onednn.provider import OneDnnProvider

__all__ = ["OneDnnProvider"]
