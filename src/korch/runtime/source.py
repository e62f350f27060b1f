"""Program -> the C++ source of a library's main unit.

The source consists of generated tables and a fixed runtime (`korch/native/`). It is self-contained, so an
artifact's sources can be compiled without Korch. `korch.h` defines the C interface.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from korch.events.kernels import TaskStage
from korch.events.schedule import TaskSegment
from korch.events.text import format_tasks
from korch.measure.compiler import ONLY_CALLS
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import ValueType
from korch.provider.provider import Kernel, Threading
from korch.provider.teams import team_refusal
from korch.runtime.bind import Program, Slot, SlotPlace
from korch.runtime.library import PLAN_FUNCTIONS
from korch.target import Target

INCLUDE = re.compile(r'^#include "(korch[\w.]*)"', re.MULTILINE)
"""Matches an include of one of Korch's headers; the group is the header's name."""


def native_text(name: str) -> str:
    """Return the text of a file of `korch/native`."""
    return files("korch").joinpath("native", name).read_text(encoding="utf-8")


def print_main(
    graph: PrimitiveGraph, program: Program[Any], target: Target, segments: Sequence[TaskSegment] = ()
) -> str:
    """Return the main source of a library.

    Args:
        graph: the model's graph, which has the constants' types.
        program: the kernels with their buffers.
        target: the machine that they are built for.
        segments: the kernels that run as tasks; all others run one after another.
    """
    constants = [
        (f"c{i}", layout.stored_type(graph.types[value])) for i, (value, layout) in enumerate(program.constants)
    ]
    tasked = {entry.use.kernel.symbol for segment in segments for entry in segment.stages if _is_split(entry)}
    running = (slots for kernel, slots in _pairs(program) if kernel.symbol)
    flat = [slot for slots in running for slot in slots]
    bindings = [i for i, s in enumerate(flat) if s.place in (SlotPlace.INPUT, SlotPlace.OUTPUT)]
    copies = [f"{{{output}, {_slot(source)}}}" for output, source in program.copies]
    sections = (
        native_text("korch.h"),
        ONLY_CALLS,
        "".join(f'#include "korch_{name}.h"\n' for name in ("interrupts", "oversubscription")),
        native_text("korch_plan.h"),
        _declarations(program.kernels, tasked),
        "namespace plan {\n",
        _tensors("INPUT", program.inputs),
        _tensors("OUTPUT", program.outputs),
        _tensors("CONSTANT", constants),
        _table("step", "STEP", _steps(program, tasked)),
        _rows("const char *const", "SYMBOLS", [c_string(k.symbol) for k in program.kernels]),
        _table("slot", "SLOT", [_slot(slot) for slot in flat]),
        _table("int64_t", "BINDING", [str(i) for i in bindings]),
        _table("copy", "COPY", copies, "COPIES"),
        f"constexpr int64_t ARENA_BYTES = {program.arena.size_bytes};\n",
        *_queues(segments, target),
        "} // namespace plan\n",
        native_text("korch_tasks.h"),
        native_text("korch_runtime.h"),
    )
    return "\n".join(sections)


def rename_plan(main: str, i: int) -> str:
    """Return the main source of a single plan, changed to be plan `i` of several plans in one library."""
    return f"#define KORCH_PLAN(name) korch_plan{i}_##name\n{main}"


def print_plans(count: int) -> str:
    """Return the main source of a library with several plans, each printed by `rename_plan`."""
    declarations: list[str] = []
    rows = []
    for i in range(count):
        # Each function has the type of the corresponding function in the interface for one plan.
        declarations += (f"decltype(korch_{n}) korch_plan{i}_{n};\n" for n in PLAN_FUNCTIONS)
        rows.append(f"{{{', '.join(f'korch_plan{i}_{n}' for n in PLAN_FUNCTIONS)}}}")
    return "\n".join(
        (
            native_text("korch.h"),
            ONLY_CALLS,
            'extern "C" {\n',
            "".join(declarations),
            _table("korch_plan", "PLAN", rows),
            "int korch_abi_version(void) { return KORCH_ABI_VERSION; }\n",
            "const korch_plan *korch_plans(int64_t *count) {\n    *count = PLAN_COUNT;\n    return PLANS;\n}\n",
            '} // extern "C"\n',
        )
    )


def c_string(text: str) -> str:
    """Return a C string literal; characters that are not printable ASCII are escaped."""
    escaped = (chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in text.encode())
    return '"' + "".join(escaped) + '"'


def _is_split(stage: TaskStage) -> bool:
    """Return whether a stage's tasks are parts of a kernel."""
    return any(part.stage >= 0 for part in stage.parts)


def _queues(segments: Sequence[TaskSegment], target: Target) -> Iterator[str]:
    """Yield the events of the tasks as comments, and the tables of the queues.

    Args:
        segments: the kernels that run as tasks.
        target: the machine, which gives the number of threads.
    """
    tasks: list[str] = []
    waits: list[str] = []
    first: list[str] = []
    for segment in segments:
        yield "".join(f"// {line}\n" for line in format_tasks(segment.graph).splitlines())
        for queue in segment.queues:
            first.append(str(len(tasks)))
            for entry in queue:
                stage = segment.stages[entry.task[0]]
                part = stage.parts[entry.task[1]]
                numbers = [stage.use.step, part.stage, part.begin, part.end, len(waits)]
                tasks.append(f"{{{', '.join(map(str, numbers))}}}")
                waits += [f"{{{other}, {ended}}}" for other, ended in entry.waits]
    rows = [f"{{{segment.steps[0]}, {segment.steps[1]}}}" for segment in segments]
    yield f"constexpr int QUEUES = {target.threads};\n"
    yield _table("segment", "SEGMENT", rows)
    yield _table("int64_t", "FIRST_TASK", [*first, str(len(tasks))])
    yield _table("task", "TASK", [*tasks, f"{{0, 0, 0, 0, {len(waits)}}}"])
    yield _table("wait", "WAIT", waits)


def _declarations(kernels: Iterable[Kernel], tasked: Container[str]) -> str:
    lines: dict[str, None] = {}
    for kernel in kernels:
        name = kernel.symbol
        if not name:
            continue
        lines[f"int {name}_run(void *, void *const *);"] = None
        if _has_team(kernel):
            lines[f"int {name}_team(void *const *, korch::Member &);"] = None
        if name in tasked:
            lines[f"void {name}_task(int, void *const *, long, long, long);"] = None
        if kernel.has_state:
            lines[f"void *{name}_create(int, char *, size_t);"] = None
            lines[f"void {name}_destroy(void *);"] = None
    return 'extern "C" {\n' + "".join(f"{line}\n" for line in lines) + "}\n"


def _has_team(kernel: Kernel) -> bool:
    """Return whether the threads of a plan run a kernel together."""
    return kernel.threading is Threading.TEAM and team_refusal(kernel) is None


def _steps(program: Program[Any], tasked: Container[str]) -> list[str]:
    rows, first = [], 0
    for kernel, slots in _pairs(program):
        name = kernel.symbol
        if not name:
            rows.append(f"{{nullptr, nullptr, nullptr, nullptr, nullptr, {first}, false}}")
            continue
        state = f"{name}_create, {name}_destroy" if kernel.has_state else "nullptr, nullptr"
        team = f"{name}_team" if _has_team(kernel) else "nullptr"
        tasks = f"{name}_task" if name in tasked else "nullptr"
        is_alone = str(team_refusal(kernel) is not None).lower()
        rows.append(f"{{{name}_run, {team}, {tasks}, {state}, {first}, {is_alone}}}")
        first += len(slots)
    return rows


def _pairs(program: Program[Any]) -> Iterator[tuple[Any, tuple[Slot, ...]]]:
    return zip(program.kernels, program.slots, strict=True)


def _tensors(name: str, tensors: Sequence[tuple[str, ValueType]]) -> str:
    sizes = [f"{name}_{i}_SHAPE" for i in range(len(tensors))]
    shapes = [
        f"const int64_t {size}[] = {{{', '.join(map(str, (*type_.shape, 0)))}}};\n"
        for size, (_, type_) in zip(sizes, tensors, strict=True)
    ]
    rows = [
        f'{{{c_string(label)}, "{type_.dtype.value}", {type_.rank}, {size}, {type_.size_bytes}}}'
        for size, (label, type_) in zip(sizes, tensors, strict=True)
    ]
    return "".join(shapes) + _table("korch_tensor", name, rows)


def _table(kind: str, name: str, rows: Sequence[str], plural: str = "") -> str:
    return _rows(f"const {kind}", plural or f"{name}S", rows) + f"constexpr int64_t {name}_COUNT = {len(rows)};\n"


def _rows(kind: str, name: str, rows: Sequence[str]) -> str:
    lines = "".join(f"    {row},\n" for row in rows)
    return f"{kind} {name}[] = {{\n{lines}    {{}}}};\n"


def _slot(slot: Slot) -> str:
    offset = f", {slot.offset}" if slot.offset else ""
    return f"{{{slot.place.value}, {slot.at}{offset}}}"
