"""Groups -> the groups that are searched, the one with the largest possible gain first.

Compared with the kernels of other providers, one program can save at most the writing and reading of intermediate
values, and the launches of all kernels but one. A group is left out if this gain is a small part of the lower bound
of the time for its inputs, outputs and operations, or a small part of the lower bound of the time of the whole model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.op import Category
from korch.superopt.sizes import BYTES_PER_NS, CYCLES_PER_NS, CacheMachine

GAIN = 0.003  # least share of its own time, and of the model's, that a group must be able to save

START_NS = 1000.0
"""The time that a kernel takes to start its threads and wait for the last one."""

OPERATIONS_PER_LANE = 4
"""Floating-point operations per lane and cycle: two fused multiply-adds."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a program for a group can save."""

    saved_ns: float  # an upper bound of the time saved
    least_ns: float  # a lower bound of the time of any program: that of its inputs, outputs and operations

    def is_worth_it(self, least: float = GAIN) -> bool:
        """Return whether the saved time is more than the share `least` of the total time."""
        return self.saved_ns > least * (self.saved_ns + self.least_ns)


def gain_of(group: Group, machine: CacheMachine) -> Gain:
    """Return what a program for a group can save over a kernel for each product and each normalization."""
    body, bandwidth = group.body, BYTES_PER_NS * machine.threads
    outputs = {value for _, value in body.outputs}
    inner = set[int]()
    for primitive in body.linear:
        inner |= {primitive.output, *(v for v in primitive.inputs if body.producers[v])}
    kept = [value for value in inner if value not in outputs and body.producers[value]]
    saved_ns = sum(START_NS + 2 * body.types[value].size_bytes / bandwidth for value in kept)
    if not kept and any(p.row.category is Category.REDUCE for p in body.primitives):
        saved_ns = START_NS
    moved = sum(body.types[value].size_bytes for _, value in (*body.inputs, *body.outputs))
    return Gain(saved_ns, moved / bandwidth + group.linear_flop / _flop_per_ns(machine))


def _flop_per_ns(machine: CacheMachine) -> float:
    return OPERATIONS_PER_LANE * machine.lanes * CYCLES_PER_NS * machine.threads


def ranked(
    groups: Iterable[tuple[Group, int]], machine: CacheMachine, work_flop: float = 0.0, least: float = GAIN
) -> Iterator[Group]:
    """Yield the groups that are worth a search, the best first, each once.

    `groups`: each group with the number of times that it occurs in the model. `least`: the share of its own time, and
    of the model's, that a group must be able to save.
    """
    least_ns = least * work_flop / _flop_per_ns(machine)
    counts: dict[str, int] = {}
    known: dict[str, Group] = {}
    for group, count in groups:
        known.setdefault(group.key, group)
        counts[group.key] = counts.get(group.key, 0) + count
    gains = {key: gain_of(group, machine) for key, group in known.items()}
    worth = [key for key in known if gains[key].is_worth_it(least) and counts[key] * gains[key].saved_ns > least_ns]
    yield from (known[key] for key in sorted(worth, key=lambda key: (-counts[key] * gains[key].saved_ns, key)))
