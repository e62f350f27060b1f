"""Triton kernels that Korch generates itself for CUDA devices."""

from korch.provider.triton.attention import TritonAttentionProvider
from korch.provider.triton.fused import TritonProvider
from korch.provider.triton.product import TritonProductProvider
from korch.provider.triton.winograd import TritonWinogradProvider

__all__ = ["TritonAttentionProvider", "TritonProductProvider", "TritonProvider", "TritonWinogradProvider"]
