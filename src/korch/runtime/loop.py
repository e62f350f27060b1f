"""The plan of one iteration -> the kernel that runs a loop.

The kernels of the plan run once for each iteration, in an arena that all iterations share. An iteration reads slices of
the loop's inputs and writes slices of its outputs in place. A state has two buffers, which are exchanged after each
iteration. Its first value is read from the loop's input, and its last value is written to the loop's output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.op import Array
from korch.primitive.ops.loop import LoopAttributes
from korch.provider.content import content_version
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.teams import team_refusal
from korch.provider.tile_kernel import comment_of
from korch.runtime.bind import Program, Slot, SlotPlace
from korch.runtime.source import STEP, has_team, step_row
from korch.system.alignment import align_up
from korch.system.content_name import content_name
from korch.target import Target
from korch.tile.llvm.constants import Constants

ALONE, TEAM, APART = "alone", "team", "apart"
"""How iterations run: on the calling thread, on threads that run all kernels together, or by kernels with threads."""

DATA, NONE = -1, -2
"""Buffers of `korch_loop.c`: the kernel's own data, or none."""

MOST_BUFFERS = 64
"""The most buffers of a kernel of an iteration; `korch_loop.c` has the same number."""

Place = tuple[int, int]
"""A buffer of the kernel, and an offset in bytes."""


@dataclass(frozen=True)
class LoopPlan:
    """The plan of one iteration."""

    # its kernels with their buffers; its inputs and outputs are in the order of the iteration's
    program: Program[Kernel]
    # for each input of the program, the position of the loop's input that it is or is a slice of
    inputs: tuple[int, ...]
    # for each constant of the program, the position of the loop's input, or the packed elements
    constants: tuple[int | Array, ...]
    # the layouts in which the loop's constant inputs are read, by position; the others are plain
    layouts: Mapping[int, Layout]
    work_flop: int  # the operations of one iteration
    text: str  # the kernels, for people

    @property
    def kernels(self) -> tuple[tuple[Kernel, tuple[Slot, ...]], ...]:
        """The kernels that run, with their buffers."""
        pairs = zip(self.program.kernels, self.program.slots, strict=True)
        return tuple((kernel, slots) for kernel, slots in pairs if kernel.symbol)

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways in which iterations can run."""
        if any(team_refusal(kernel) for kernel, _ in self.kernels):
            return (APART,)
        has_team = any(kernel.threading is Threading.TEAM for kernel, _ in self.kernels)
        return (ALONE, TEAM) if has_team else (ALONE,)


LoopKey = tuple[LoopAttributes, frozenset[int]]
"""A loop without the number of an output, and the positions of its inputs that are constants."""


def loop_key(group: Group) -> LoopKey | Refusal:
    """Return the key of the loop that a group computes some outputs of; a refusal if it computes anything else."""
    rows = group.body.primitives
    found = {(p.attributes.without_output, p.inputs) for p in rows if isinstance(p.attributes, LoopAttributes)}
    if len(found) != 1 or any(p.op != "loop" for p in rows):
        return Refusal("it is not one loop")
    ((loop, inputs),) = found
    fixed = [i for i, v in enumerate(inputs) if v in group.position and group.position[v] in group.constant_inputs]
    return loop, frozenset(i for i in fixed if i >= loop.states + len(loop.reads_backward))


class LoopProvider:
    """Runs loops whose iterations have a plan.

    Attributes:
        plans: the plans, or why there is none.
    """

    name = "loop"
    version = content_version("runtime/loop.py", "runtime/bind.py", "runtime/memory.py")
    group_shapes = ()

    def __init__(self, plans: Mapping[LoopKey, LoopPlan | Refusal]) -> None:
        self.plans = plans

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the loop in each way in which its iterations can run."""
        plan = self._plan(group)
        if isinstance(plan, Refusal):
            return plan
        loop = group.body.primitives[0].attributes_as(LoopAttributes)
        layouts = list(group.plain_layouts[0])
        for i, layout in plan.layouts.items():
            layouts[group.position[group.body.primitives[0].inputs[i]]] = layout
        name = content_name("", repr((plan.program, plan.inputs, plan.constants)))
        flop = loop.trips * plan.work_flop
        variants = [f"{loop.trips} iterations {mode}: {plan.text} {name}" for mode in plan.modes]
        return [Offer(tuple(layouts), group.plain_layouts[1], variant, flop) for variant in variants]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the kernel that runs all iterations."""
        plan = self._plan(group)
        if isinstance(plan, Refusal):
            return plan
        mode = next(m for m in plan.modes if f" iterations {m}: " in offer.variant)
        return _Printer(group, plan).kernel(mode, comment_of(group, offer), target)

    def _plan(self, group: Group) -> LoopPlan | Refusal:
        key = loop_key(group)
        found = key if isinstance(key, Refusal) else self.plans.get(key, Refusal("its iterations have no plan"))
        if isinstance(found, LoopPlan) and any(len(slots) > MOST_BUFFERS for _, slots in found.kernels):
            return Refusal(f"a kernel of an iteration has more than {MOST_BUFFERS} buffers")
        return found


class _Printer:
    """The tables of a loop's source; `korch_loop.c` describes them."""

    def __init__(self, group: Group, plan: LoopPlan) -> None:
        self.group, self.plan, self.program = group, plan, plan.program
        self.rows = group.body.primitives[0]
        self.loop = self.rows.attributes_as(LoopAttributes)
        self.workspace = len(group.inputs) + len(group.outputs)
        self.used_bytes = 0
        self.data: list[bytes] = []
        self.uniform: dict[int, Place] = {}
        self.arena = self.allocate(self.program.arena.size_bytes)
        by_value = {p.output: p.attributes_as(LoopAttributes).output for p in group.body.primitives}
        self.written = {by_value[v]: len(group.inputs) + i for i, (_, v) in enumerate(group.body.outputs)}

    @property
    def count(self) -> Place:
        """The place of the number of iterations; none if it is fixed."""
        return self.given(len(self.rows.inputs) - 1) if self.loop.is_counted else (NONE, 0)

    def allocate(self, size_bytes: int) -> Place:
        """Return a new place in the workspace."""
        place = self.workspace, self.used_bytes
        self.used_bytes += align_up(size_bytes)
        return place

    def given(self, position: int) -> Place:
        """Return the place of an input of the loop; a uniform constant is in the kernel's own data."""
        value = self.rows.inputs[position]
        if value in self.group.position:
            return self.group.position[value], 0
        if value not in self.uniform:
            self.uniform[value] = self.constant(self.group.body.constants[value].array)
        return self.uniform[value]

    def constant(self, packed: Array) -> Place:
        """Return the place of a constant of the iteration in the kernel's own data."""
        offset = sum(map(len, self.data))
        content = np.ascontiguousarray(packed).tobytes()
        self.data.append(content.ljust(align_up(len(content)), b"\0"))
        return DATA, offset

    def slices(self, place: Place, size_bytes: int, is_backward: bool) -> tuple[int, int, int]:
        """Return the place of a tensor's first slice, and the size of one, negative if the last is used first."""
        return (*place, -size_bytes if is_backward else size_bytes)

    def tables(self) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        """Yield the name and the rows of each table of tensors."""
        loop, inputs, outputs = self.loop, self.program.inputs, self.program.outputs
        of_position = {position: i for i, position in enumerate(self.plan.inputs)}
        first = len(inputs)
        states: list[tuple[int, ...]] = []
        streams: list[tuple[int, ...]] = []
        fixed: list[tuple[int, ...]] = []
        for s in range(loop.states):
            size = outputs[s][1].size_bytes
            last = (self.written.get(s, NONE), 0)
            others = self.allocate(2 * align_up(size))
            states.append((of_position[s], first + s, *self.given(s), *last, *others, align_up(size)))
        for i, is_backward in enumerate(loop.reads_backward, loop.states):
            tensor = of_position[i]
            streams.append((tensor, *self.slices(self.given(i), inputs[tensor][1].size_bytes, is_backward)))
        for i, is_backward in enumerate(loop.writes_backward, loop.states):
            size = outputs[i][1].size_bytes
            if i in self.written:
                streams.append((first + i, *self.slices((self.written[i], 0), size, is_backward)))
            else:
                fixed.append((first + i, *self.allocate(size), 0))
        for tensor, position in enumerate(self.plan.inputs):
            if position >= loop.states + len(loop.reads_backward):
                fixed.append((tensor, *self.given(position), 0))
        for tensor, source in enumerate(self.plan.constants, first + len(outputs)):
            fixed.append((tensor, *(self.given(source) if isinstance(source, int) else self.constant(source)), 0))
        fixed.append((self.tensors - 1, *self.arena, 0))
        yield "states", states
        yield "streams", streams
        yield "fixed", fixed

    @property
    def tensors(self) -> int:
        """The number of tensors of an iteration: inputs, outputs, constants and the arena."""
        program = self.program
        return len(program.inputs) + len(program.outputs) + len(program.constants) + 1

    def slot(self, slot: Slot) -> tuple[int, int, int]:
        first = len(self.program.inputs)
        match slot.place:
            case SlotPlace.INPUT:
                return slot.at, 0, 0
            case SlotPlace.OUTPUT:
                return first + slot.at, slot.offset, 0
            case SlotPlace.CONSTANT:
                return first + len(self.program.outputs) + slot.at, 0, 0
            case SlotPlace.ARENA:
                return self.tensors - 1, slot.at, slot.offset

    def kernel(self, mode: str, comment: str, target: Target) -> Kernel:
        """Return the kernel."""
        made, parts = Constants(target.isa), [kernel for kernel, _ in self.plan.kernels]
        has_state = any(kernel.has_state for kernel in parts)
        rows: list[str] = []
        slots: list[tuple[int, ...]] = []
        for kernel, own in self.plan.kernels:
            rows.append(step_row(made, kernel, len(slots), has_team=mode != APART and has_team(kernel)))
            slots += map(self.slot, own)
        first, outputs = len(self.program.inputs), self.program.outputs
        copies = [(first + i, *self.slot(s), outputs[i][1].size_bytes) for i, s in self.program.copies]
        tables: dict[str, Sequence[tuple[int, ...]]] = {"slots": slots, **dict(self.tables()), "copies": copies}
        numbers = {name: made.numbers(name, own) for name, own in tables.items()}
        fields = [
            *(f"i64 {n}" for n in (target.threads, self.loop.trips, *self.count, self.tensors)),
            "ptr @NAME_team" if mode == TEAM else "ptr null",
            made.block("data", b"".join(self.data)),
            made.table("parts", STEP, rows),
            *(numbers[name] for name in ("slots", "states", "streams", "fixed", "copies")),
        ]
        functions = ("run", *(("team",) if mode == TEAM else ()), *(("create", "destroy") if has_state else ()))
        kernel = named_kernel(
            made.kernel("korch_loop", fields, functions, comment),
            has_state=has_state,
            workspace_bytes=max(1, self.used_bytes),
            opens=tuple(dict.fromkeys(name for part in parts for name in part.opens)),
            threading={ALONE: Threading.CALLER, TEAM: Threading.TEAM, APART: Threading.OWN}[mode],
        )
        units = [text for part in parts for text in part.texts]
        return replace(kernel, units=tuple(dict.fromkeys(units)))
