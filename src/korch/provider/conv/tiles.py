"""Estimated times of register tiles of pixels and vectors of channels, in vector multiplications."""

from collections.abc import Callable
from typing import TypeVar

Tile = TypeVar("Tile")

TILE_COST = 2.0
"""The overhead of a tile of results."""

LATENCY = 8
"""The independent multiplications that are needed to keep the vector units busy."""

FETCH = 2.6
"""The time of reading a vector of weights of 32 bytes from the level-2 cache (Zen 3; longer vectors: not measured)."""

WORTH_IT = 0.92
"""Another tile replaces the usual one if it takes less than this part of the usual one's time."""


def pixels_cost(pixels: int, together: int, vectors: int, fetch: float = 0.0) -> float:
    """Return the time of some pixels, of which `together` make a tile with `vectors` vectors of channels each.

    `fetch`: the time of reading a vector of weights, while others are multiplied.
    """

    def cost(count: int) -> float:
        return max(count * vectors, LATENCY, fetch * vectors) + TILE_COST

    whole, rest = divmod(pixels, together)
    return whole * cost(together) + (cost(rest) if rest else 0)


def worth_it(best: Tile, usual: Tile, total: Callable[[Tile], float]) -> Tile:
    """Return the best tile if it takes clearly less time than the usual one, else the usual one."""
    return best if total(best) < WORTH_IT * total(usual) else usual
