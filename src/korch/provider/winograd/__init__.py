"""Winograd's convolutions, generated: pads read as indices, elementwise successors fused."""

from korch.provider.winograd.provider import WinogradProvider

__all__ = ["WinogradProvider"]
