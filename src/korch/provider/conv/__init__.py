"""Generated convolutions: a single convolution or a chain of convolutions as one kernel."""

from korch.provider.conv.provider import ConvProvider

__all__ = ["ConvProvider"]
