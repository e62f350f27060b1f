"""Records of the search of a model in segments, for the report."""

from __future__ import annotations

from dataclasses import dataclass

from korch.binary_program.problem import Status
from korch.search.result import Round


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search of a block in one interface.

    Attributes:
        block: the block's number.
        interface: the interface's number.
        what: its phase, "first" or "refine".
        began_s: its start, in seconds since the trace began; for a recalled search, the time when it
            was recalled.
        is_recalled: whether an earlier run did the search. The seconds of its rounds are then that run's.
        rounds: its rounds, with seconds since the search began.
    """

    block: int
    interface: int
    what: str
    began_s: float
    is_recalled: bool
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class InterfaceRecord:
    """The plan of a block in one interface, and how many segments use it."""

    layouts: str
    used: int
    objective_ns: int | None
    bound_ns: int
    status: Status


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block of equal segments.

    Attributes:
        instances: the numbers of its segments.
        primitives: the number of its primitives.
        candidates: the number of its candidates.
        layouts: the layouts of each of its interfaces.
        interfaces: the results for the interfaces that have a plan.
        searches: its searches.
    """

    instances: tuple[int, ...]
    primitives: int
    candidates: int
    layouts: tuple[str, ...]
    interfaces: tuple[InterfaceRecord, ...]
    searches: tuple[SearchRecord, ...]


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The cut after a segment: the values that cross it, and its price in bytes moved."""

    values: tuple[int, ...]
    price_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A model in segments. The bound holds for plans in which no kernel crosses a cut.

    Attributes:
        segments: the number of segments.
        different: the number of blocks (different segments).
        programs: the number of pairs of a block and an interface that have a plan.
        layout_changes: the number of changes of layout between segments.
        blocks: the blocks.
        cuts: the cuts after the segments.
    """

    segments: int
    different: int
    programs: int = 0
    layout_changes: int = 0
    blocks: tuple[BlockRecord, ...] = ()
    cuts: tuple[CutRecord, ...] = ()
