"""Checks a tile program, and prints it as the kernel of a group's offer."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace

from korch.candidate.candidate import Group, Offer
from korch.provider.provider import Kernel, Threading
from korch.ranges.live import Count
from korch.target import Target
from korch.tile.analysis.shares import by_rows, shares_of
from korch.tile.check.check import check_program
from korch.tile.ir.parameters import PART, by_outer, parametric
from korch.tile.ir.program import TileProgram
from korch.tile.llvm.print import PrintedLlvm, print_llvm

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

    `stream_bytes`: outputs of at least this size are written with non-temporal stores, which bypass the caches.
    `counts`: how the parameters follow from the size; if None, loops over the extents of which only the first elements
    are needed become loops to parameters.

    Raises:
        InvalidGraphError: a check fails.
        TextLimitError: the kernel's source would be too long.
    """
    text = comment_of(group, offer) + remark
    if counts is None:
        program, counts = in_parameters(program)
    printed = print_llvm(program, text, target, stream_bytes, counts)
    return replace(printed_kernel(program, printed), counts=tuple(counts.items()))


def in_parameters(program: TileProgram) -> tuple[TileProgram, Mapping[str, Count]]:
    """Return a program with parameters for the counts of needed elements, and these counts.

    Rows that combine two axes need a table of their positions; where a stage has none, one axis has all its elements.
    """
    made, counts = parametric(program)
    if PART not in counts:
        return made, counts
    for before, stage in zip(program.stages, made.stages, strict=True):
        shares = shares_of(stage, made.parameter_ranges)
        if stage != before and (shares is None or by_rows(stage, shares) is None):
            return parametric(by_outer(program))
    return made, counts


def printed_kernel(program: TileProgram, printed: PrintedLlvm) -> Kernel:
    """Check a program that has already been printed, and return its kernel.

    Raises:
        InvalidGraphError: a check fails; what a provider builds so is a fault (`korch.provider.faults`).
    """
    _check(program)
    return Kernel(
        printed.symbol,
        printed.source,
        workspace_bytes=printed.workspace_bytes,
        threading=Threading.TEAM if printed.is_parallel else Threading.CALLER,
        program=program,
        thread_bytes=printed.thread_bytes,
    )


def _check(program: TileProgram) -> None:
    for line in check_program(program):
        logger.info("a tile program is not fully checked: %s", line)
