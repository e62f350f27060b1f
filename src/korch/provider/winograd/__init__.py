"""Winograd's convolutions, generated, with what moves the image and what follows."""

from korch.provider.winograd.provider import WinogradProvider

__all__ = ["WinogradProvider"]
