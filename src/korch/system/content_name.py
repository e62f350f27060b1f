"""Text -> a name derived from a hash of its content."""

import hashlib

DIGITS = 16
"""Hexadecimal digits of a name."""


def content_name(stem: str, text: str) -> str:
    """Return a name for a text, such as the symbol of a kernel; equal texts get equal names."""
    return f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"
