"""What printing gives for Triton: launches, and the memory that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

from korch.primitive.types import DType
from korch.tile.program import Buffer, Load, Pass, Stage, TileProgram
from korch.tile.program_order import ProgramOrder
from korch.tile.triton.text import Text


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a stage with contractions or loops is printed and launched.

    Attributes:
        warps: of a program.
        stages: turns of a loop whose operands are read at a time.
        is_persistent: whether as many programs are launched as run at a time, each with several tasks.
        has_descriptors: whether operands are read through tensor descriptors (Hopper's tensor memory accelerator).
    """

    warps: int = 4
    stages: int = 2
    is_persistent: bool = False
    has_descriptors: bool = False

    def programs(self, tasks: int, processors: int) -> int:
        """Return how many programs are launched."""
        resident = processors * max(1, RESIDENT_WARPS // self.warps)
        return min(tasks, resident) if self.is_persistent else tasks


USUAL = LaunchOptions()

RESIDENT_WARPS = 16
"""Warps that a multiprocessor runs at a time where programs have large tiles."""


@dataclass(frozen=True, slots=True)
class PrintedLaunches:
    """One launch.

    Attributes:
        source: the text of two Triton functions: NAME_task computes what one program does, whose number is its
            first argument, and NAME is what is launched.
        buffers: the buffers that it takes, in order; those that it names itself begin with "c"
            (tables) or "s" (partial results).
        grid: tasks.
        programs: that are launched; each has one task, or several if they are fewer.
        warps: warps of a program.
        order: which grid points each task computes; None if each may touch all that the kernel does.
    """

    source: str
    buffers: tuple[str, ...]
    grid: int
    programs: int
    warps: int
    order: ProgramOrder | None = None


@dataclass
class PrintedProgram:
    """All launches of a program, and the memory that they use beside inputs and outputs.

    Attributes:
        program: what is printed.
        launches: in order.
        scratch: names, types and sizes in elements.
        tables: names of constant tables and their entries.
        descriptors: how many operands are read through tensor descriptors.
    """

    program: TileProgram
    launches: list[PrintedLaunches] = field(default_factory=list)
    scratch: dict[str, tuple[DType, int]] = field(default_factory=dict)
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptors: int = 0

    def add(
        self, text: Text, comment: str, grid: int, warps: int, order: ProgramOrder | None, programs: int | None = None
    ) -> None:
        """Add the launch of a text; equal tables of several launches are one.

        Args:
            text: the lines of a task, with the buffers and tables that it uses.
            comment: stands at the head of the function.
            grid: tasks.
            warps: warps of a program.
            order: which grid points each task computes; None if it is not known.
            programs: that are launched; one for each task if not given.
        """
        programs = grid if programs is None else programs
        renamed = {}
        for table, name in text.tables.items():
            known = next((n for n, t in self.tables.items() if t == table), None)
            renamed[name] = known or f"c{len(self.tables)}"
            self.tables[renamed[name]] = table
        head = "".join(f"    # {line}\n" for line in comment.splitlines())
        parameters = ", ".join(f"p_{name}" for name in text.arguments)
        body = "\n".join(text.lines)
        run = f"    NAME_task(tl.program_id(0), {parameters})\n"
        if programs < grid:
            tasks = f"tl.range(tl.program_id(0), {grid}, {programs}, flatten=True)"
            run = f"    for pid in {tasks}:\n        NAME_task(pid, {parameters})\n"
        source = (
            f"@triton.jit\ndef NAME_task(pid, {parameters}):\n{head}{body}\n\n\n"
            f"@triton.jit\ndef NAME({parameters}):\n{run}"
        )
        buffers = tuple(renamed.get(name, name) for name in text.arguments)
        self.launches.append(PrintedLaunches(source, buffers, grid, programs, warps, order))


MANY_NUMBERS = 12
"""With more numbers of a point than these, a thread has one point at a time."""


def warps_for(elements: int, numbers: int = 1) -> int:
    """Return the warps of a program.

    Args:
        elements: of its tile.
        numbers: that it has of each element at a time.
    """
    return min(8, max(1, elements // (256 if numbers <= MANY_NUMBERS else 32)))


def numbers_of(pass_: Pass) -> int:
    """Return how many numbers a pass loads or stores for each point."""
    return max(sum(isinstance(op, Load) for op in pass_.ops), len(pass_.sinks))


class StageLaunch:
    """The launches of one stage; there are four kinds."""

    def __init__(
        self, program: TileProgram, stage: Stage, comment: str, found: PrintedProgram, processors: int
    ) -> None:
        self.program = program
        self.stage = stage
        self.comment = comment
        self.found = found
        self.processors = processors
        self.sizes = {buffer.name: buffer.size for buffer in program.buffers}
        self.text = Text()

    def buffer(self, name: str) -> Buffer:
        """Return a buffer of the program."""
        return self.program.buffer(name)

    def finish(self, grid: int, warps: int, order: ProgramOrder | None = None, programs: int | None = None) -> None:
        """Add the launch that has been written, and begin another."""
        self.found.add(self.text, self.comment, grid, warps, order, programs)
        self.text = Text()

    def widen(self) -> None:
        """Make the program's number wide if some index needs that."""
        if max(self.sizes.values(), default=0) >= 1 << 31:
            self.text.line("pid = pid.to(tl.int64)")
