"""Korch."""
