"""Lowers candidates to tile programs, and prints these as source code."""
