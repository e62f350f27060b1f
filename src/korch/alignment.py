"""Sizes rounded up, and memory at addresses that are multiples of a vector and of a line of the cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""A cache line, and the widest vector register, in bytes."""
HUGE_PAGE = 2 << 20


def ceil_div(number: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-number // divisor)


def round_up(number: int, step: int) -> int:
    """Return the least multiple of a step that is not below a number."""
    return -(-number // step) * step


def align_up(size_bytes: int) -> int:
    """Return the least multiple of `ALIGNMENT` that is not below `size_bytes`."""
    return round_up(size_bytes, ALIGNMENT)


def aligned_bytes(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins at a multiple of `ALIGNMENT`.

    Large blocks ask for huge pages: weights are read in every run, and a TLB miss each 4 KiB shows.

    Returns:
        uint8[size_bytes].
    """
    if size_bytes < HUGE_PAGE:
        return short_lived_bytes(size_bytes)
    # Private: shared memory, the default, gets no huge pages on most machines.
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    pages = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(pages, np.uint8)
    start = -address_of(block) % HUGE_PAGE
    return block[start : start + size_bytes]


def short_lived_bytes(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the same from the heap, which hands out again what it was given back.

    New pages are zeroed by the system first, so for what each run allocates the heap is faster.

    Returns:
        uint8[size_bytes].
    """
    return short_lived_array((size_bytes,), np.dtype(np.uint8), size_bytes)


def short_lived_array(shape: tuple[int, ...], dtype: np.dtype[Any], size_bytes: int) -> npt.NDArray[Any]:
    """Return an uninitialised dense array in such memory; the size is that of the shape."""
    block = np.empty(size_bytes + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, block, -address_of(block) % ALIGNMENT)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where the memory of a dense array begins."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # a third of the time of the other way
    except (TypeError, ValueError, BufferError):  # it is read-only or empty, or buffers have no such type
        address: int = array.__array_interface__["data"][0]
        return address
