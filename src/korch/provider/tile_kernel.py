"""Checks a tile program, and prints it as the kernel of a group's offer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace

from korch.candidate.candidate import Group, Offer
from korch.provider.provider import Kernel, Threading
from korch.target import Target
from korch.tile.check.check import check_program
from korch.tile.cpp.print import PrintedCpp, print_cpp
from korch.tile.ir.program import TileProgram
from korch.tile.llvm.print import REGION, PrintedLlvm
from korch.tile.trim.trim import Count

logger = logging.getLogger("korch.provider")


def comment_of(group: Group, offer: Offer) -> str:
    """Return the comment at the head of a kernel's source: what it computes, in which layouts."""
    return f"{group.text}layouts {' '.join(map(str, (*offer.inputs, '->', *offer.outputs)))}"


def kernel_of(
    program: TileProgram,
    group: Group,
    offer: Offer,
    target: Target,
    *,
    stream_bytes: int = sys.maxsize,
    remark: str = "",
    counts: Mapping[str, Count] | None = None,
) -> Kernel:
    """Check a program, and print it as the kernel of an offer.

    Args:
        program: the program.
        group: what it computes.
        offer: the offer, which has the layouts.
        target: the machine that it runs on.
        stream_bytes: outputs of at least this size are written with non-temporal stores, which bypass the caches.
        remark: more lines for the comment at the head.
        counts: how the parameters of a trimmed program follow from the size.

    Raises:
        InvalidGraphError: a check fails.
        TextLimitError: the kernel's source would be too long.
    """
    text = comment_of(group, offer) + remark
    printed = print_cpp(program, text, target.lanes, target.threads, stream_bytes, counts)
    return replace(printed_kernel(program, printed), counts=tuple((counts or {}).items()))


def llvm_kernel(program: TileProgram, printed: PrintedLlvm) -> Kernel:
    """Check a program that has already been printed, and return its kernel.

    Raises:
        InvalidGraphError: a check fails; what a provider builds so is a fault (`korch.provider.faults`).
    """
    _check(program)
    threading = Threading.TEAM if printed.is_parallel else Threading.CALLER
    return Kernel(
        printed.symbol,
        printed.source,
        workspace_bytes=printed.workspace_bytes,
        threading=threading,
        program=program,
        shared=REGION if printed.is_parallel else "",
    )


def printed_kernel(program: TileProgram, printed: PrintedCpp) -> Kernel:
    """Check a program that has already been printed, and return its kernel.

    Raises:
        InvalidGraphError: a check fails; what a provider builds so is a fault (`korch.provider.faults`).
    """
    _check(program)
    threading = Threading.TEAM if printed.is_parallel else Threading.CALLER
    return Kernel(
        printed.symbol,
        printed.source,
        workspace_bytes=printed.workspace_bytes,
        threading=threading,
        program=program,
        thread_bytes=printed.thread_bytes,
        marked=printed.marked,
    )


def _check(program: TileProgram) -> None:
    for line in check_program(program):
        logger.info("a tile program is not fully checked: %s", line)
