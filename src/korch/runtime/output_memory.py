"""Memory of large outputs, which later runs use again when no array has it any more."""

import sys

import numpy as np
import numpy.typing as npt

from korch.system.alignment import aligned_bytes

LARGE = 32 << 20
"""The C library gives memory of more bytes back to the system at once, whose new pages cost more than writing them."""

KEPT = 2
"""The blocks of an output that are kept: one that a caller may still have, and one for the next run."""


class OutputMemory:
    """The memory of one output."""

    def __init__(self) -> None:
        # Each block with the references to its memory while no array has it. Threads take blocks out of the list.
        self._kept: list[tuple[npt.NDArray[np.uint8], int]] = []

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return uninitialised memory, always of the same size, that no other array has."""
        for _ in range(len(self._kept)):
            try:
                block, unused = self._kept.pop(0)
            except IndexError:  # another thread has it
                break
            found = block[:] if _references(block) == unused else None  # before another thread can take the block
            self._kept.append((block, unused))
            if found is not None:
                return found
        block = aligned_bytes(size_bytes)
        unused = _references(block)
        found = block[:]
        self._kept = [*self._kept[-KEPT + 1 :], (block, unused)]
        return found


def _references(block: npt.NDArray[np.uint8]) -> int:
    """Return the number of references to the memory of a block: NumPy lets all views refer to the same array."""
    return sys.getrefcount(block.base)
