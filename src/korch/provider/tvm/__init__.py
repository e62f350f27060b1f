"""Kernels that TVM tunes: groups of elementwise, broadcast, reduce and layout primitives, and small products."""

from korch.provider.tvm.provider import TvmProvider

__all__ = ["TvmProvider"]
