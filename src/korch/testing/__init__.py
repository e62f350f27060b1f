"""Test oracles for Korch's own tests and for third-party providers."""
