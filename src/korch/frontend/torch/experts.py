"""Makes mixtures of experts of the transformers library compute in a form that can be exported.

The library computes experts by a loop over the chosen experts, which depends on data, by an operator of its own, or
by a batch of products by gathered weights. All compute the same. The batch uses only operators of PyTorch, and Korch
does not copy the gathered weights (`korch.fission.gathered`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXPORTED = "batched_mm"
"""The library's name for the implementation of experts that is traced."""

ATTRIBUTE = "_experts_implementation"


@contextmanager
def experts_as_batches(module: Any) -> Iterator[None]:
    """Let the experts in a module be computed by a batch of products inside the context."""
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
