"""Chosen kernels in order -> a program: the buffers that each kernel reads and writes, and their places.

A port is a value in a layout. A step writes its results to buffers in the arena, which are live until the
last step that reads them; a model output is written directly into the caller's memory. A constant is
packed at build time into each layout that a step requires. Layouts that put a value's elements in
the same order are treated as equal, so a kernel that requires channels-last reads a plain n x c x 1 x 1 value.

A concatenation in place runs no kernel: the buffers of its operands are parts of the result's buffer,
which is live from the first step that writes an operand. No kernel overwrites its inputs, so the
operands are unchanged until the last reader of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import DType, ValueType
from korch.runtime.memory import ArenaBuffer, ArenaPlan, plan_arena
from korch.runtime.transposed import Port, transposed_port
from korch.system.alignment import align_up


class AnyKernel(Protocol):
    """The properties of a kernel that a plan needs, for any target."""

    @property
    def symbol(self) -> str:
        """Its name, unique to its content."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """The size of the scratch memory that it needs."""
        ...

    @property
    def thread_bytes(self) -> int:
        """The size of each thread's part, if the scratch memory consists of one part for each thread; else 0."""
        ...

    @property
    def size_input(self) -> str:
        """The model input that it reads as an additional last buffer, or ""."""
        ...


K = TypeVar("K", bound=AnyKernel)


@dataclass(frozen=True)
class PlanStep(Generic[K]):
    """One kernel of a plan."""

    candidate: Candidate  # the primitives that it computes, and its layouts
    kernel: K  # the code
    cost_ns: float = 0.0  # measured time, or the bound if it was not measured
    bound_ns: float = 0.0  # the lower bound of the time of any kernel for this candidate
    is_measured: bool = False  # whether `cost_ns` was measured


class SlotPlace(Enum):
    """The kind of memory of a buffer; the enum's value is its name in records."""

    ARENA = "ARENA"
    CONSTANT = "CONSTANT"
    INPUT = "INPUT"
    OUTPUT = "OUTPUT"


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer: its kind of memory, and its offset in the arena or its index among the constants, inputs or outputs.

    For a part of a model output, `offset` is its distance from the begin of the output in bytes. For a workspace
    with one part for each thread, `offset` is the distance of the parts of adjacent threads in bytes.
    """

    place: SlotPlace
    at: int
    offset: int = 0


@dataclass(frozen=True)
class Program(Generic[K]):
    """The kernels of a plan and their buffers: on a CPU, the content of the library's main source."""

    inputs: tuple[tuple[str, ValueType], ...]  # (name, type) of each model input
    outputs: tuple[tuple[str, ValueType], ...]  # (name, type) of each model output
    constants: tuple[Port, ...]  # value and layout of each packed constant
    kernels: tuple[K, ...]  # the kernels in the order in which they run; those without a symbol do not run
    slots: tuple[tuple[Slot, ...], ...]  # per kernel, its buffers: inputs, outputs, then the workspace if it has one
    copies: tuple[tuple[int, Slot], ...]  # (output, source) of the model outputs that no kernel writes directly
    arena: ArenaPlan  # the size and offsets of the arena


def bind_steps(graph: PrimitiveGraph, steps: Sequence[PlanStep[K]], threads: int = 1) -> Program[K]:
    """Decide the place of each buffer of a plan.

    `threads`: the number of threads. The workspaces of one thread share one place over all kernels, so that they
    contain only cache lines that the thread wrote itself, and none that are in the caches of other cores.

    Raises:
        InvalidGraphError: a step reads a value before any step wrote it, or no step writes an output.
    """
    binder = _Binder(graph)
    for step in steps:
        binder.add(step)
    return binder.finish(steps, threads)


class _Binder:
    """The tables that are extended step by step. Here `at` of an arena slot is a buffer's number, not an offset."""

    def __init__(self, graph: PrimitiveGraph) -> None:
        self.graph = graph
        self.input_of = {value: i for i, (_, value) in enumerate(graph.inputs)}
        self.current: dict[Port, Slot] = {}
        self.buffers: list[ArenaBuffer] = []
        self.constants: dict[tuple[str, Layout], int] = {}
        self.constant_ports: list[Port] = []
        self.constants_of: dict[tuple[int, ...], list[int]] = {}  # their numbers, by the sizes of axes other than 1
        self.slots: list[tuple[Slot, ...]] = []
        self.whole_of: dict[int, tuple[int, int]] = {}  # by part: the whole buffer, and the offset in it
        self.own: dict[tuple[int, int], int] = {}  # bytes of workspaces per thread, by step and index of the slot
        self.mixed: set[int] = set()  # buffers whose bytes may be denormal numbers if read as floats

    def port(self, value: int, layout: Layout) -> Port:
        return value, layout.normalized(self.graph.types[value].shape)

    def add(self, step: PlanStep[Any]) -> None:
        number = len(self.slots)
        group, offer = step.candidate.group, step.candidate.offer
        slots = [
            self.read(self.port(value, layout), number, step.kernel.symbol)
            for value, layout in zip(group.inputs, offer.inputs, strict=True)
        ]
        for value, layout in zip(group.outputs, offer.outputs, strict=True):
            port = self.port(value, layout)
            if offer.updates:
                slots.append(self.updated(port, slots[0], number))
                continue
            is_mixed = self.graph.types[value].dtype is not DType.F32
            self.current[port] = self.new_buffer(self.size_bytes(port), number, is_mixed)
            slots.append(self.current[port])
        if offer.is_in_place:
            self.join(slots[:-1], slots[-1], number)
        if step.kernel.thread_bytes:
            self.own[number, len(slots)] = step.kernel.thread_bytes
            slots.append(Slot(SlotPlace.ARENA, -1))
        elif step.kernel.workspace_bytes:
            slots.append(self.new_buffer(step.kernel.workspace_bytes, number, True))
        if step.kernel.size_input:
            names = [name for name, _ in self.graph.inputs]
            slots.append(Slot(SlotPlace.INPUT, names.index(step.kernel.size_input)))
        self.slots.append(tuple(slots))

    def join(self, parts: Sequence[Slot], whole: Slot, number: int) -> None:
        """Make the buffers of `parts` consecutive parts of the buffer of `whole`."""
        offset = 0
        for part in parts:
            if part.place is not SlotPlace.ARENA or part.at in self.whole_of:
                raise InvalidGraphError(
                    "it is a concatenation in place of what lies elsewhere already", where=f"step {number}"
                )
            self.whole_of[part.at] = whole.at, offset
            offset += self.buffers[part.at].size_bytes
        if offset != self.buffers[whole.at].size_bytes:
            raise InvalidGraphError(
                f"it is a concatenation in place of {offset} bytes to {self.buffers[whole.at].size_bytes}",
                where=f"step {number}",
            )

    def updated(self, port: Port, slot: Slot, number: int) -> Slot:
        """Let the memory of a state be that of its new value, too."""
        if slot.place is not SlotPlace.INPUT:
            raise InvalidGraphError("it overwrites what is no input of the model", where=f"step {number}")
        self.current[port] = slot
        return slot

    def size_bytes(self, port: Port) -> int:
        return port[1].size_bytes(self.graph.types[port[0]])

    def new_buffer(self, size_bytes: int, number: int, is_mixed: bool) -> Slot:
        if is_mixed:
            self.mixed.add(len(self.buffers))
        self.buffers.append(ArenaBuffer(size_bytes, number, number))
        return Slot(SlotPlace.ARENA, len(self.buffers) - 1)

    def read(self, port: Port, number: int, symbol: str) -> Slot:
        if port in self.current:
            slot = self.current[port]
            if slot.place is SlotPlace.ARENA:
                self.keep_until(slot.at, number)
            return slot
        given = self.given(port)
        if given is None:
            raise InvalidGraphError(
                f"it reads %{port[0]} in layout {port[1]}, which no step before it writes",
                where=f"step {number} ({symbol})",
            )
        return given

    def keep_until(self, at: int, number: int) -> None:
        self.buffers[at] = replace(self.buffers[at], last=number)

    def given(self, port: Port) -> Slot | None:
        """Return the slot of a constant or a model input, or None if the port is neither."""
        value, layout = port
        if value in self.graph.constants:
            key = (self.graph.constants[value].digest, layout)
            if key not in self.constants:
                self.constants[key] = self.number(port)
            return Slot(SlotPlace.CONSTANT, self.constants[key])
        if value in self.input_of and layout.is_plain:
            return Slot(SlotPlace.INPUT, self.input_of[value])
        return None

    def number(self, port: Port) -> int:
        """Return the number of a constant: that of its transpose if this has the same bytes, or else a new one."""
        sizes = tuple(n for n in self.graph.types[port[0]].shape if n != 1)
        for i in self.constants_of.get(sizes[::-1], ()):
            if transposed_port(self.graph, self.constant_ports[i], port[0]) == port:
                return i
        self.constants_of.setdefault(sizes, []).append(len(self.constant_ports))
        self.constant_ports.append(port)
        return len(self.constant_ports) - 1

    def finish(self, steps: Sequence[PlanStep[K]], threads: int) -> Program[K]:
        moved: dict[int, Slot] = {}
        copies: list[tuple[int, Slot]] = []
        for i, (name, value) in enumerate(self.graph.outputs):
            port = self.port(value, Layout.plain(self.graph.types[value].rank))
            source = self.current.get(port) or self.given(port)
            if source is None:
                raise InvalidGraphError(f"no step writes it (%{value} in layout {port[1]})", where=f"output {name!r}")
            is_whole = source.place is SlotPlace.ARENA and source.at not in self.whole_of
            if is_whole and source.at not in moved:
                moved[source.at] = Slot(SlotPlace.OUTPUT, i)
            else:
                copies.append((i, source))
                if source.place is SlotPlace.ARENA:
                    self.keep_until(source.at, len(steps))
        arena = self.place(moved, any(step.kernel.size_input for step in steps))
        types = self.graph.types
        slots = [[self.located(s, moved) for s in own] for own in self.slots]
        thread_bytes = align_up(max(self.own.values()) + 1) if self.own else 0  # + 1, so that no offset is 0
        for (number, at), own_bytes in self.own.items():
            slots[number][at] = Slot(SlotPlace.ARENA, arena.size_bytes, thread_bytes - own_bytes)
        return Program(
            inputs=tuple((name, types[value]) for name, value in self.graph.inputs),
            outputs=tuple((name, types[value]) for name, value in self.graph.outputs),
            constants=tuple(self.constant_ports),
            kernels=tuple(step.kernel for step in steps),
            slots=tuple(map(tuple, slots)),
            copies=tuple((i, self.located(source, moved)) for i, source in copies),
            arena=arena.with_more(threads * thread_bytes),
        )

    def place(self, moved: dict[int, Slot], is_partial: bool) -> ArenaPlan:
        """Plan the arena; extend `moved`, the places of buffers by their numbers.

        Kernels that compute only the needed rows read whole blocks, so they read some rows after the last written one
        and ignore the results. If the data there were denormal floats, these kernels would be many times slower. So if
        there are such kernels, buffers of floats share no memory with other buffers.
        """
        live = dict(enumerate(self.buffers))
        for i, part in enumerate(self.buffers):
            whole, _ = self.within(i)
            first = min(live[whole].first, part.first)
            live[whole] = replace(live[whole], first=first, last=max(live[whole].last, part.last))
        numbers = [i for i in live if i not in self.whole_of and i not in moved]
        apart = [i for i in numbers if is_partial and i in self.mixed]
        arenas: list[ArenaPlan] = []
        for own in ([i for i in numbers if i not in apart], apart):
            start = sum(arena.size_bytes for arena in arenas)
            arenas.append(plan_arena([live[i] for i in own]))
            for i, offset in zip(own, arenas[-1].offsets, strict=True):
                moved[i] = Slot(SlotPlace.ARENA, start + offset)
        return ArenaPlan(
            tuple(moved[i].at for i in numbers),
            sum(arena.size_bytes for arena in arenas),
            sum(arena.lower_bound_bytes for arena in arenas),
        )

    def within(self, at: int) -> tuple[int, int]:
        """Return the outermost buffer that a buffer is a part of (itself if it is no part), and its offset there."""
        offset = 0
        while at in self.whole_of:
            at, more = self.whole_of[at]
            offset += more
        return at, offset

    def located(self, slot: Slot, moved: dict[int, Slot]) -> Slot:
        """Return a slot with its final place, once all buffers are placed."""
        if slot.place is not SlotPlace.ARENA or slot.at < 0:
            return slot
        at, offset = self.within(slot.at)
        whole = moved[at]
        if whole.place is SlotPlace.ARENA:
            return Slot(SlotPlace.ARENA, whole.at + offset)
        return Slot(whole.place, whole.at, offset)
