"""Providers turn candidates into kernels. The search compares all providers' kernels by the same rules.

Read `provider.py`, then `generated.py`.
"""
