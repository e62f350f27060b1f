"""A block of a model -> its candidates, and the interfaces for which it is searched."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Candidate, Group
from korch.candidate.enumerate import EnumerationReport, enumerate_groups
from korch.candidate.layout import layouts_by_kind
from korch.candidate.shape import Compose, GroupShape
from korch.measure.meter import AnyMeter
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.search.baselines import grown_by_rules, has_layouts
from korch.search.infeasible import check_every_primitive_runs
from korch.search.instance import EXACT, PLAIN, Answers, Errors, Interface, collect_candidates
from korch.segments.block import Block, Partition
from korch.segments.join import Joined, held_values
from korch.system.deadline import Deadline

BLOCK_GROUPS = 6000  # most groups of a block; if there are more, the block is enumerated with smaller groups
FEWEST_PRIMITIVES = 6  # the limit on the size of groups is not lowered below this

KINDS = {"any": ("last", "blocked"), "last": ("last",), "plain": ()}
"""By the option `layouts`: the layouts besides the plain one, channels-last ("last") and channel-blocked."""


@dataclass(frozen=True)
class BlockTask:
    """A block with its candidates."""

    block: Block  # the block
    candidates: tuple[Candidate, ...]  # the candidates for its parts
    enumeration: EnumerationReport  # the report on the enumeration of its groups
    interfaces: tuple[Interface, ...]  # the interfaces for which it is searched; the plain one first
    errors: Errors = EXACT  # the errors of its less precise primitives, over all of its instances, and their budget

    @property
    def count(self) -> int:
        """How often the block is in the model."""
        return len(self.block.instances)


def prepare(
    partition: Partition,
    block: Block,
    answers: Answers,
    options: Options,
    held: Collection[int] | None = None,
    deadline: Deadline | None = None,
) -> BlockTask:
    """Return a block's candidates.

    `deadline`: when to stop enumerating; the candidates found by then are returned.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    graph, shapes = block.graph, answers.shapes()
    groups, enumeration = _groups(graph, options, shapes, may_be_fewer=not partition.is_whole, deadline=deadline)
    asked = []
    for group in _until(deadline, groups, enumeration):
        asked.append(group)
        answers.ask(group)
    # Without measurements, bounds alone can't decide which layout is worth a layout change.
    is_plain = partition.is_whole or not options.measure
    kinds = KINDS[options.ablation.layouts]
    interfaces = (PLAIN,) if is_plain else interfaces_of(partition, block, answers.target.lanes, kinds)
    candidates, refusals = collect_candidates(graph, asked, answers, interfaces, held)
    candidates = tuple(c for c in candidates if has_layouts(c, options.ablation.layouts))
    check_every_primitive_runs(graph, candidates, refusals)
    if options.ablation.groups == "by-rules":
        candidates = tuple(grown_by_rules(graph, candidates))
    return BlockTask(block, candidates, enumeration, interfaces)


def prepare_all(
    partition: Partition, joined: Joined, meter: AnyMeter, options: Options, deadline: Deadline | None = None
) -> list[BlockTask]:
    """Return the candidates of all blocks, fewer of them if the deadline passes.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    answers = Answers(meter.providers, meter.target, meter.faults)  # shared, since blocks have many groups in common
    pairs = list(zip(partition.blocks, held_values(partition, joined), strict=True))
    return [
        prepare(partition, block, answers, options, held, deadline and deadline.shared(len(pairs) - i))
        for i, (block, held) in enumerate(pairs)
    ]


def _until(deadline: Deadline | None, groups: Iterable[Group], enumeration: EnumerationReport) -> Iterator[Group]:
    """Yield all groups until the deadline, and afterwards only groups that a plan may need."""
    for group in groups:
        is_needed = len(group.primitives) == 1 or (group.primitives, group.outputs) in enumeration.needed
        if is_needed or deadline is None or not deadline.is_over:
            yield group


def _groups(
    graph: PrimitiveGraph,
    options: Options,
    shapes: Sequence[GroupShape | Compose],
    *,
    may_be_fewer: bool,
    deadline: Deadline | None,
) -> tuple[tuple[Group, ...], EnumerationReport]:
    """Return a block's groups; if there are too many, halve the limit on their primitives and try again."""

    def enumerated(most_groups: int | None) -> tuple[tuple[Group, ...], EnumerationReport]:
        limited = replace(options, search=replace(limits, max_primitives=size))
        return enumerate_groups(graph, limited, most_groups, deadline, shapes)

    limits = options.search
    size = limits.max_primitives
    while may_be_fewer and size > FEWEST_PRIMITIVES:
        groups, enumeration = enumerated(BLOCK_GROUPS)
        if enumeration.groups <= BLOCK_GROUPS:
            return groups, enumeration
        size //= 2
    return enumerated(None)


def interfaces_of(partition: Partition, block: Block, lanes: int, kinds: Sequence[str]) -> tuple[Interface, ...]:
    """Return the interfaces for which a block is searched.

    The first is plain. For each kind there is one with all values in that layout, except the model's
    inputs and outputs, which are plain (a model output that segments read, too, is not excepted). If a
    value is a model input or output in some instances only, there are also interfaces with only the
    outputs, and with only the inputs, in that layout.
    """
    graph = block.graph
    instances = [partition.instances[i] for i in block.instances]
    read = {value for instance in partition.instances for value in instance.inputs}
    given = {value for _, value in partition.source.inputs}
    written = {value for _, value in partition.source.outputs}

    inputs, outputs = [], []
    is_end = False
    for (_, value), places in zip(graph.inputs, zip(*(one.inputs for one in instances), strict=True), strict=True):
        if not given.issuperset(places):
            inputs.append(value)
            is_end |= not given.isdisjoint(places)
    for (_, value), places in zip(graph.outputs, zip(*(one.outputs for one in instances), strict=True), strict=True):
        if value not in graph.given and not (written - read).issuperset(places):
            outputs.append(value)
            is_end |= not written.isdisjoint(places)
    found = [PLAIN]
    for kind in kinds:
        sides = [(inputs, outputs), ([], outputs), (inputs, [])] if is_end else [(inputs, outputs)]
        for before, after in sides:
            layouts = {
                value: layout
                for value in (*before, *after)
                if (layout := layouts_by_kind(graph.types[value], lanes).get(kind)) is not None
            }
            found.append(Interface(layouts))
    distinct = {str(interface): interface for interface in found}
    return tuple(distinct.values())
