"""Candidate -> the least work of its kernel, and an analytic guess of its time at the calibrated rates."""

from dataclasses import dataclass
from functools import partial

from korch.candidate.candidate import Candidate
from korch.costs.operations import has_windows, operations
from korch.costs.rates import Calibration, Work
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.stored import StoredAttributes
from korch.schedule.contraction import is_of_bytes

START_NS = 3000
"""The guess of the fixed time of a kernel: a parallel region, cold weights, ends of loops."""

GUESS = 2.4
"""The typical ratio of a kernel's time to the sum of the times for its bytes and for its operations at the
calibrated rates."""

OPERATION_FLOP = 3
"""The cost of an operation on an element in a generated kernel, in floating-point operations of multiply-adds;
the element is also loaded or stored."""

WINDOW_OPERATION = 8
"""The cost of an operation in windows along rows, as a multiple of other operations: the ends of the windows
are guarded, and their rows are not aligned."""

BYTES_TOGETHER = 4
"""The most products of bytes that vector units accumulate in the time of one float32 multiply-add."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The analytic guess of a kernel's time, and its parts in nanoseconds."""

    guess_ns: int  # the guess
    near_ns: float  # for the bytes from and to the shared cache
    cold_ns: float  # for the weights that come from memory
    flop_ns: float  # for the operations of products
    operations_ns: float  # for the operations on single elements
    operations: float  # the number of these


def analyse(candidate: Candidate, calibration: Calibration, *, is_cold: bool) -> Analysis:
    """Return the analytic guess of the time of a candidate's kernel.

    A kernel's inputs have just been written, but its weights and outputs are not in the cores' private
    caches, so its bytes are assumed to come from the shared cache.

    Args:
        candidate: a group with an offer.
        calibration: the rates of the machine.
        is_cold: whether weights come from memory.
    """
    if candidate.offer.is_in_place:
        return Analysis(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    work, levels = work_of(candidate, is_cold=is_cold), calibration.levels
    shared = levels[-2] if len(levels) > 1 else levels[-1]
    near_ns = 1e9 * (work.moved_bytes - work.cold_bytes) / (shared.read_bytes_per_s + shared.write_bytes_per_s)
    cold_ns = 1e9 * work.cold_bytes / levels[-1].read_bytes_per_s
    flop_ns = 1e9 * work.flop / calibration.flop_per_s(work)
    count = _operations(candidate)
    operations_ns = 1e9 * OPERATION_FLOP * count / calibration.rate_flop_per_s
    guess_ns = START_NS + int(GUESS * (near_ns + cold_ns + flop_ns) + operations_ns)
    return Analysis(guess_ns, near_ns, cold_ns, flop_ns, operations_ns, count)


def work_of(candidate: Candidate, *, is_cold: bool) -> Work:
    """Return the least work of a candidate's kernel, from which its bound follows."""
    flop, group = needed_flop(candidate), candidate.group
    constant_bytes = candidate.read_constant_bytes
    read_bytes, write_bytes = candidate.read_bytes, candidate.write_bytes
    if candidate.served is not None:
        share = candidate.served.share(group.body)
        read_bytes = constant_bytes + int(share * (read_bytes - constant_bytes))
        write_bytes = int(share * write_bytes)
        flop = int(flop * share)
    return Work(read_bytes, write_bytes, flop, constant_bytes if is_cold else 0, candidate.offer.pairs)


def needed_flop(candidate: Candidate) -> int:
    """Return the operations that count for a kernel's bound: those of the units that determine its rate."""
    flop = max(candidate.linear_flop, candidate.offer.work_flop) - candidate.offer.vector_flop
    body = candidate.group.body
    has_bytes = candidate.offer.pairs == 0 and any(map(partial(_multiplies_bytes, body), body.linear))
    return flop // BYTES_TOGETHER if has_bytes else flop


def _multiplies_bytes(body: PrimitiveGraph, root: Primitive) -> bool:
    """Return whether a product multiplies bytes, which its data may be rounded to."""
    at = root.attributes
    return is_of_bytes(body, root) or (isinstance(at, StoredAttributes) and at.is_rounded)


_COUNTS: dict[str, tuple[float, bool]] = {}
"""By the key of a group: the operations on single elements, and whether it has windows. Offers share groups."""


def _operations(candidate: Candidate) -> float:
    """Return the operations of a loop nest on single elements, weighted for windows along rows; 0 if it is none."""
    group = candidate.group
    if not candidate.offer.is_loop_nest:
        return 0.0
    if group.key not in _COUNTS:
        _COUNTS[group.key] = operations(group.body), has_windows(group)
    count, is_windows = _COUNTS[group.key]
    return count * (WINDOW_OPERATION if is_windows and _is_along_rows(candidate) else 1)


def _is_along_rows(candidate: Candidate) -> bool:
    return any(layout.is_plain and t.rank > 2 and t.shape[-1] > 1 for t, layout in candidate.stored)
