"""Generated matrix products, fused with layout steps before and after and with elementwise steps."""

from korch.provider.gemm.provider import GemmProvider

__all__ = ["GemmProvider"]
