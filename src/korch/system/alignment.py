"""Rounding up of sizes, and memory aligned to vectors and cache lines."""

import contextlib
import ctypes
import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""The size in bytes of a cache line, and of the widest vector register."""
HUGE_PAGE = 2 << 20
SMALL = 4096
"""The largest array, in bytes, for which it takes longer to align it than kernels then gain."""


_byte_of = ctypes.c_char.from_buffer


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up."""
    return -(-number // divisor)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def align_up(size_bytes: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that is at least `size_bytes`."""
    return round_up(size_bytes, ALIGNMENT)


def aligned_bytes(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins at a multiple of `ALIGNMENT`.

    Large allocations ask for huge pages: weights are read in every run, and one TLB miss per 4 KiB is noticeable.

    Returns:
        uint8[size_bytes].
    """
    if size_bytes < HUGE_PAGE:
        return short_lived_bytes(size_bytes)
    # MAP_PRIVATE, because shared mappings (the default) get no huge pages on most machines.
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    pages = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system may not support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(pages, np.uint8)
    start = -address_of(block) % HUGE_PAGE
    return block[start : start + size_bytes]


def zeroed_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros in long-lived memory."""
    block = aligned_bytes(math.prod(shape) * dtype.itemsize)
    if block.size < HUGE_PAGE:  # else the system has just provided it, filled with zeros
        block[:] = 0
    return block.view(dtype).reshape(shape)


def short_lived_bytes(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins at a multiple of `ALIGNMENT`, from the heap.

    The heap reuses freed memory. New pages from the system must first be zeroed, so the heap is faster for
    memory that each run allocates.

    Returns:
        uint8[size_bytes].
    """
    block = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -address_of(block) % ALIGNMENT
    return block[start : start + size_bytes]


def short_lived_array(shape: tuple[int, ...], dtype: np.dtype[Any], size_bytes: int) -> npt.NDArray[Any]:
    """Return an uninitialised dense array from the heap, in aligned memory unless its size is at most `SMALL` bytes."""
    if size_bytes <= SMALL:
        return np.empty(shape, dtype)
    return short_lived_bytes(size_bytes).view(dtype).reshape(shape)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address at which the memory of a dense array begins."""
    try:
        return ctypes.addressof(_byte_of(array.data))  # a third of the fallback's time
    except (TypeError, ValueError, BufferError):  # read-only, empty, or a type without a buffer
        address: int = array.__array_interface__["data"][0]
        return address
