"""Records of the search of a model in segments, for the report."""

from dataclasses import dataclass

from korch.binary_program.problem import Status
from korch.search.result import Round


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search of a block in one interface."""

    block: int  # the block's number
    interface: int  # the interface's number
    what: str  # its phase, "first" or "refine"
    began_s: float  # its start, in seconds since the trace began; for a recalled search, the time when it was recalled
    is_recalled: bool  # whether an earlier run did the search. The seconds of its rounds are then that run's.
    rounds: tuple[Round, ...]  # its rounds, with seconds since the search began


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
    """A block of equal segments."""

    instances: tuple[int, ...]  # the numbers of its segments
    primitives: int  # the number of its primitives
    candidates: int  # the number of its candidates
    layouts: tuple[str, ...]  # the layouts of each of its interfaces
    interfaces: tuple[InterfaceRecord, ...]  # the results for the interfaces that have a plan
    searches: tuple[SearchRecord, ...]  # its searches


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The cut after a segment: the values that cross it, and its price in bytes moved."""

    values: tuple[int, ...]
    price_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A model in segments. The bound holds for plans in which no kernel crosses a cut."""

    segments: int  # the number of segments
    different: int  # the number of blocks (different segments)
    programs: int = 0  # the number of pairs of a block and an interface that have a plan
    layout_changes: int = 0  # the number of changes of layout between segments
    blocks: tuple[BlockRecord, ...] = ()  # the blocks
    cuts: tuple[CutRecord, ...] = ()  # the cuts after the segments
