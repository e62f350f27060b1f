"""The plan of one iteration -> the kernel that runs a loop.

The kernels of the plan run once for each iteration, in an arena that all iterations share. An iteration reads slices of
the loop's inputs and writes slices of its outputs in place. A state has two buffers, which are exchanged after each
iteration. Its first value is read from the loop's input, and its last value is written to the loop's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.op import Array
from korch.primitive.ops.loop import LoopAttributes
from korch.provider.content import content_version
from korch.provider.parts import MOST_BUFFERS, Parts
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.teams import team_refusal
from korch.provider.tile_kernel import comment_of
from korch.runtime.bind import Program, Slot, SlotPlace
from korch.system.alignment import align_up
from korch.system.content_name import content_name
from korch.target import Target

ALONE, TEAM, APART = "alone", "team", "apart"
"""How iterations run: on the calling thread, on threads that run all kernels together, or by kernels with threads."""


@dataclass(frozen=True)
class LoopPlan:
    """The plan of one iteration.

    Attributes:
        program: its kernels with their buffers; its inputs and outputs are in the order of the iteration's.
        inputs: for each input of the program, the position of the loop's input that it is or is a slice of.
        constants: for each constant of the program, the position of the loop's input, or the packed elements.
        layouts: the layouts in which the loop's constant inputs are read, by position; the others are plain.
        work_flop: the operations of one iteration.
        text: the kernels, for people.
    """

    program: Program[Kernel]
    inputs: tuple[int, ...]
    constants: tuple[int | Array, ...]
    layouts: Mapping[int, Layout]
    work_flop: int
    text: str

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
        return _Printer(group, plan).kernel(mode, comment_of(group, offer), target.threads)

    def _plan(self, group: Group) -> LoopPlan | Refusal:
        key = loop_key(group)
        found = key if isinstance(key, Refusal) else self.plans.get(key, Refusal("its iterations have no plan"))
        if isinstance(found, LoopPlan) and any(len(slots) > MOST_BUFFERS for _, slots in found.kernels):
            return Refusal(f"a kernel of an iteration has more than {MOST_BUFFERS} buffers")
        return found


class _Printer:
    """The tables of a loop's source; `korch_loop.h` describes them."""

    def __init__(self, group: Group, plan: LoopPlan) -> None:
        self.group, self.plan, self.program = group, plan, plan.program
        self.rows = group.body.primitives[0]
        self.loop = self.rows.attributes_as(LoopAttributes)
        self.workspace = len(group.inputs) + len(group.outputs)
        self.used_bytes = 0
        self.data: list[bytes] = []
        self.fills: list[str] = []
        self.filled: dict[int, str] = {}
        self.arena = self.allocate(self.program.arena.size_bytes)
        by_value = {p.output: p.attributes_as(LoopAttributes).output for p in group.body.primitives}
        self.written = {by_value[v]: len(group.inputs) + i for i, (_, v) in enumerate(group.body.outputs)}

    def allocate(self, size_bytes: int) -> str:
        """Return a new place in the workspace."""
        place = f"{{{self.workspace}, {self.used_bytes}}}"
        self.used_bytes += align_up(size_bytes)
        return place

    def given(self, position: int) -> str:
        """Return the place of an input of the loop; a uniform constant is written to the workspace."""
        value = self.rows.inputs[position]
        if value in self.group.position:
            return f"{{{self.group.position[value]}, 0}}"
        if value not in self.filled:
            constant = self.group.body.constants[value]
            place = self.filled[value] = self.allocate(constant.type.size_bytes)
            element = np.asarray(constant.scalar).tobytes()
            self.fills.append(f"{{{place}, {constant.type.size}, {len(element)}, {{{_list(element)}}}}}")
        return self.filled[value]

    def constant(self, packed: Array) -> str:
        """Return the place of a constant of the iteration in the kernel's own data."""
        offset = sum(map(len, self.data))
        content = np.ascontiguousarray(packed).tobytes()
        self.data.append(content.ljust(align_up(len(content)), b"\0"))
        return f"{{korch_loop::DATA, {offset}}}"

    def tables(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield the type, the name and the rows of each table of tensors."""
        loop, inputs, outputs = self.loop, self.program.inputs, self.program.outputs
        of_position = {position: i for i, position in enumerate(self.plan.inputs)}
        first = len(inputs)
        states, streams, fixed = [], [], []
        for s in range(loop.states):
            size = outputs[s][1].size_bytes
            last = f"{{{self.written[s]}, 0}}" if s in self.written else "{korch_loop::NONE, 0}"
            others = self.allocate(2 * align_up(size))
            states.append(f"{{{of_position[s]}, {first + s}, {self.given(s)}, {last}, {others}, {align_up(size)}}}")
        for i, is_backward in enumerate(loop.reads_backward, loop.states):
            tensor = of_position[i]
            size = inputs[tensor][1].size_bytes
            streams.append(f"{{{tensor}, {self.given(i)}, {size}, {str(is_backward).lower()}}}")
        for i, is_backward in enumerate(loop.writes_backward, loop.states):
            size = outputs[i][1].size_bytes
            place, step = (f"{{{self.written[i]}, 0}}", size) if i in self.written else (self.allocate(size), 0)
            streams.append(f"{{{first + i}, {place}, {step}, {str(is_backward).lower()}}}")
        for tensor, position in enumerate(self.plan.inputs):
            if position >= loop.states + len(loop.reads_backward):
                fixed.append(f"{{{tensor}, {self.given(position)}}}")
        for tensor, source in enumerate(self.plan.constants, first + len(outputs)):
            fixed.append(f"{{{tensor}, {self.given(source) if isinstance(source, int) else self.constant(source)}}}")
        fixed.append(f"{{{self.tensors - 1}, {self.arena}}}")
        yield "State", "states", states
        yield "Stream", "streams", streams
        yield "Fixed", "fixed", fixed
        yield "Fill", "fills", self.fills

    @property
    def tensors(self) -> int:
        """The number of tensors of an iteration: inputs, outputs, constants and the arena."""
        program = self.program
        return len(program.inputs) + len(program.outputs) + len(program.constants) + 1

    def slot(self, slot: Slot) -> str:
        first = len(self.program.inputs)
        match slot.place:
            case SlotPlace.INPUT:
                return f"{{{slot.at}, 0, 0}}"
            case SlotPlace.OUTPUT:
                return f"{{{first + slot.at}, {slot.offset}, 0}}"
            case SlotPlace.CONSTANT:
                return f"{{{first + len(self.program.outputs) + slot.at}, 0, 0}}"
            case SlotPlace.ARENA:
                return f"{{{self.tensors - 1}, {slot.at}, {slot.offset}}}"

    def kernel(self, mode: str, comment: str, threads: int) -> Kernel:
        """Return the kernel."""
        parts = Parts.of([kernel for kernel, _ in self.plan.kernels])
        slots = [self.slot(slot) for _, own in self.plan.kernels for slot in own]
        ends = [len(own) for _, own in self.plan.kernels]
        rows = [parts.row(kernel, sum(ends[:i])) for i, kernel in enumerate(parts.kernels)]
        first, outputs = len(self.program.inputs), self.program.outputs
        copies = [f"{{{first + i}, {self.slot(s)}, {outputs[i][1].size_bytes}}}" for i, s in self.program.copies]
        tables = [("Part", "parts", rows), ("Slot", "slots", slots), *self.tables(), ("Copy", "copies", copies)]
        lines = ["".join(f"// {line}\n" for line in comment.splitlines()), *parts.sources, '#include "korch_loop.h"\n']
        lines.append(f"alignas(64) static const unsigned char NAME_data[] = {{{_list(b''.join(self.data)) or '0'}}};")
        lines += (
            f"static const korch_loop::{kind} NAME_{name}[] = {{{', '.join((*rows, '{}'))}}};"
            for kind, name, rows in tables
        )
        members = ", ".join(f"{{NAME_{name}, {len(rows)}}}" for _, name, rows in tables)
        lines.append(f"static const korch_loop::Loop NAME_loop = {{{self.loop.trips}, NAME_data, {members}}};\n")
        lines += _functions(mode, self.tensors, threads, parts.has_state)
        kernel = named_kernel(
            "\n".join(lines),
            has_state=parts.has_state,
            workspace_bytes=max(1, self.used_bytes),
            libraries=parts.libraries,
            opens=parts.opens,
            threading={ALONE: Threading.CALLER, TEAM: Threading.TEAM, APART: Threading.OWN}[mode],
        )
        return replace(kernel, units=parts.units)


def _functions(mode: str, tensors: int, threads: int, has_state: bool) -> Iterator[str]:
    """Yield the kernel's functions."""
    call = f"korch_loop::run<{tensors}>(NAME_loop, state, buffers, own, {str(mode == APART).lower()})"
    if mode == TEAM:
        yield (
            'extern "C" int NAME_team(void* const* buffers, korch::Member& own) {\n'
            f"  void* const state = nullptr;\n  return {call};\n}}\n"
        )
        body = f"  return korch::run_region({threads}, NAME_team, buffers);"
    else:
        body = f"  korch::Member own;\n  return {call};"
    if has_state:
        yield (
            'extern "C" void* NAME_create(int threads, char* error, size_t error_size) {\n'
            "  return korch_loop::create(NAME_loop, threads, error, error_size);\n}\n\n"
            'extern "C" void NAME_destroy(void* state) { korch_loop::destroy(NAME_loop, state); }\n'
        )
    yield f'extern "C" int NAME_run(void* state, void* const* buffers) {{\n{body}\n}}\n'


def _list(content: Iterable[int]) -> str:
    return ", ".join(map(str, content))
