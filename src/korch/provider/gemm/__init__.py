"""Matrix products, generated, with layout steps on both sides and elementwise steps fused."""

from korch.provider.gemm.provider import GemmProvider

__all__ = ["GemmProvider"]
