"""Mixtures of experts of the transformers library -> the form of them that can be exported.

The library computes experts by a loop over those that are chosen, which depends on data, by an operator of its own, or
by a batch of products by gathered weights. All mean the same; the last one has operators of PyTorch only, and Korch
does not copy the weights (`korch.fission.gathered`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXPORTED = "batched_mm"
"""How experts are computed when they are traced."""

ATTRIBUTE = "_experts_implementation"


@contextmanager
def experts_as_batches(module: Any) -> Iterator[None]:
    """Let the experts in a module be computed by a batch of products meanwhile."""
    configs = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(part, "_is_expert_parallel") and hasattr(config, ATTRIBUTE):
            configs[id(config)] = config
    before = [(config, getattr(config, ATTRIBUTE)) for config in configs.values()]
    try:
        for config, _ in before:
            setattr(config, ATTRIBUTE, EXPORTED)
        yield
    finally:
        for config, value in before:
            setattr(config, ATTRIBUTE, value)
