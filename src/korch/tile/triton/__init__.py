"""Prints tile programs as Triton."""
