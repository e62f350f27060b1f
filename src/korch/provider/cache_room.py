"""The part of a core's second-level cache that the data of a kernel may fill: one table for all providers.

The shares differ with what else passes through the cache meanwhile. They were fitted by timing kernels.
"""

from typing import Literal

from korch.target import Target

CacheUse = Literal["image", "operand", "constant", "tiles", "components", "kept rows", "chunk", "streamed"]

SHARES: dict[CacheUse, float] = {
    "image": 0.25,  # a task's part of an image: weights and results pass through the cache, and the next part comes
    "operand": 0.5,  # what a task reads again and again; the other operand and the results pass through the rest
    "constant": 1.0,  # components of a constant operand: larger ones are better split again in each run
    "tiles": 0.9,  # transformed tiles: all that a stage of a Winograd convolution reads or writes often
    "components": 0.6,  # components of weights, or a part of a product's right operand, that all tasks read
    "kept rows": 0.45,  # rows of an image for matrix units: what is copied next fills as much again
    "chunk": 0.1,  # each of two chunks of a strip that streams past kept rows
    "streamed": 0.2,  # split operands of rows that stream past kept weights
}


def cache_room(use: CacheUse, target: Target) -> float:
    """Return how many bytes of a core's second-level cache may be filled with something."""
    return SHARES[use] * target.l2_bytes
