"""Explanations and comparisons."""
