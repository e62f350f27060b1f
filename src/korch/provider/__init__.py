"""Providers turn candidates into kernels. The search compares all providers' kernels by the same rules."""
