"""Prints tile programs as C++."""
