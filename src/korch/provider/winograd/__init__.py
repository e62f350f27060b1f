"""Generated Winograd convolutions, fused with the moves of the image and with the elementwise steps after them."""

from korch.provider.winograd.provider import WinogradProvider

__all__ = ["WinogradProvider"]
