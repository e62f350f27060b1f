"""Generated convolutions: one, or a chain of them in one kernel."""

from korch.provider.conv.provider import ConvProvider

__all__ = ["ConvProvider"]
