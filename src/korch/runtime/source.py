"""Program -> the tables of a plan as a module of LLVM IR without code; the runtime (`korch_plan.c`) walks them.

`korch_plan.c` has the tables' types. Kernels are named by their functions, so linking a plan compiles nothing else.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Any

from korch.events.kernels import TaskStage
from korch.events.schedule import TaskSegment
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import ValueType
from korch.provider.provider import Kernel, Threading
from korch.provider.teams import team_refusal
from korch.runtime.bind import Program, Slot, SlotPlace
from korch.system.content_name import content_name
from korch.target import REQUIRED_FLAGS, Target
from korch.tile.llvm.constants import Constants

PLAN = "plan_"
"""The beginning of the name of a plan, and of its file."""

STEP = "{ ptr, ptr, ptr, ptr, ptr, i64, i64 }"
"""The type of a `korch_step`."""

PLACES = list(SlotPlace)
"""The numbers of places are their positions here, as in `korch_plan.c`."""


def print_plan(
    graph: PrimitiveGraph, program: Program[Any], target: Target, segments: Sequence[TaskSegment] = ()
) -> tuple[str, str]:
    """Return the name of a plan, and the module that defines it.

    `segments`: the kernels that run as tasks; all others run one after another.
    """
    constants = [
        (f"c{i}", layout.stored_type(graph.types[value])) for i, (value, layout) in enumerate(program.constants)
    ]
    tasked = {entry.use.kernel.symbol for segment in segments for entry in segment.stages if _is_split(entry)}
    running = (slots for kernel, slots in _pairs(program) if kernel.symbol)
    flat = [slot for slots in running for slot in slots]
    bindings = [(i,) for i, s in enumerate(flat) if s.place in (SlotPlace.INPUT, SlotPlace.OUTPUT)]
    made = Constants(target.isa)
    fields = [
        _tensors(made, "inputs", program.inputs),
        _tensors(made, "outputs", program.outputs),
        _tensors(made, "constants", constants),
        made.table("steps", STEP, _steps(made, program, tasked)),
        made.table("symbols", "ptr", [made.string(k.symbol).removeprefix("ptr ") for k in program.kernels]),
        made.numbers("slots", list(map(_slot, flat))),
        made.numbers("bindings", bindings),
        made.numbers("copies", [(output, *_slot(source)) for output, source in program.copies]),
        *_queues(made, segments),
        f"i64 {program.arena.size_bytes}",
        f"i64 {target.threads}",
    ]
    name = content_name(PLAN.rstrip("_"), "\n".join((made.head, *made.lines, *fields)))
    return name, made.text(name, fields)


def print_list(names: Sequence[str], isa: str) -> str:
    """Return the module that lists the plans of a library, and the flags of /proc/cpuinfo that it needs."""
    made = Constants(isa)
    made.lines += [f"@{name} = external hidden constant i8" for name in dict.fromkeys(names)]
    flags = made.string("".join(f"{flag} " for flag in REQUIRED_FLAGS[isa]))
    return made.text("korch_listed", [made.table("plans", "ptr", [f"@{name}" for name in names]), flags])


def _tensors(made: Constants, name: str, tensors: Sequence[tuple[str, ValueType]]) -> str:
    """Return the length and the address of a table of tensors."""
    rows = []
    for i, (label, type_) in enumerate(tensors):
        shape = made.numbers(f"{name}{i}", [(n,) for n in type_.shape])
        dtype = made.string(type_.dtype.value)
        rows.append(f"{{ {made.string(label)}, {dtype}, {shape}, i64 {type_.size_bytes} }}")
    return made.table(name, "{ ptr, ptr, i64, ptr, i64 }", rows)


def _is_split(stage: TaskStage) -> bool:
    """Return whether a stage's tasks are parts of a kernel."""
    return any(part.stage >= 0 for part in stage.parts)


def _queues(made: Constants, segments: Sequence[TaskSegment]) -> Iterator[str]:
    """Yield the tables of the queues of tasks."""
    tasks: list[tuple[int, ...]] = []
    waits: list[tuple[int, int]] = []
    first: list[tuple[int]] = []
    for segment in segments:
        for queue in segment.queues:
            first.append((len(tasks),))
            for entry in queue:
                stage = segment.stages[entry.task[0]]
                part = stage.parts[entry.task[1]]
                tasks.append((stage.use.step, part.stage, part.begin, part.end, len(waits)))
                waits += entry.waits
    yield made.numbers("segments", [segment.steps for segment in segments])
    yield made.numbers("first_tasks", [*first, (len(tasks),)])
    yield made.numbers("tasks", [*tasks, (0, 0, 0, 0, len(waits))])
    yield made.numbers("waits", waits)


def has_team(kernel: Kernel) -> bool:
    """Return whether the threads of a plan run a kernel together."""
    return kernel.threading is Threading.TEAM and team_refusal(kernel) is None


def _steps(made: Constants, program: Program[Any], tasked: Container[str]) -> list[str]:
    rows, first = [], 0
    for kernel, slots in _pairs(program):
        is_tasked = kernel.symbol in tasked
        rows.append(step_row(made, kernel, first, has_team=has_team(kernel), is_tasked=is_tasked))
        first += len(slots) if kernel.symbol else 0
    return rows


def step_row(made: Constants, kernel: Any, first_slot: int, *, has_team: bool, is_tasked: bool = False) -> str:
    """Return the row of a step in a table of `STEP`s; one without a symbol runs nothing."""
    exist = {"run": True, "team": has_team, "task": is_tasked}
    exist |= dict.fromkeys(("create", "destroy"), kernel.has_state)
    functions = made.kernel_functions(kernel.symbol, exist if kernel.symbol else dict.fromkeys(exist, False))
    is_alone = bool(kernel.symbol) and team_refusal(kernel) is not None
    return f"{{ {functions}, i64 {first_slot}, i64 {int(is_alone)} }}"


def _pairs(program: Program[Any]) -> Iterator[tuple[Any, tuple[Slot, ...]]]:
    return zip(program.kernels, program.slots, strict=True)


def _slot(slot: Slot) -> tuple[int, int, int]:
    return PLACES.index(slot.place), slot.at, slot.offset
