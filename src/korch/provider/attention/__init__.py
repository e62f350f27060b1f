"""Generated attention: two matrix products and the softmax between them in one kernel."""

from korch.provider.attention.provider import AttentionProvider

__all__ = ["AttentionProvider"]
