"""Proposes kernels of groups by TVM's MetaSchedule, in a process of its own, which TVM may abort.

    python -m korch.provider.tvm.worker

Each line of the standard input is a question in JSON and is answered by a line. `group` begins a new group; `count`
asks for this many kernels, given the times of those before. Nothing is run here: Korch times them as it times its own.

MetaSchedule's rules and postprocessors make the design space. Its search strategies and two of its mutators crash in
TVM 0.27, so schedules are drawn here as its replay of traces does: decisions are random, or are those of the fastest
schedule but for one.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any

MODULE = "tvm.s_tir.tensor_intrin"
"""TVM parses all its tensor instructions, also those of GPUs, before it tunes, which takes 20 s; none is used."""
sys.modules[MODULE] = ModuleType(MODULE)

import llvmlite.binding as llvm  # noqa: E402
from tvm import s_tir, tirx  # noqa: E402
from tvm.s_tir import meta_schedule as ms  # noqa: E402

from korch.errors import excerpt  # noqa: E402
from korch.primitive.text import parse_graph  # noqa: E402
from korch.provider.tvm.expressions import GroupTensors  # noqa: E402
from korch.provider.tvm.lower import Lowered, NotLoweredError, lower, target_of  # noqa: E402
from korch.tile.llvm.emit import Emit  # noqa: E402
from korch.tile.llvm.isa import ISAS  # noqa: E402

JOBS_PER_CORE = 16  # the most tasks of a stage for each thread, MetaSchedule's default
VECTOR_ELEMENTS = 64  # the most elements of an innermost loop that becomes one vector, its default
UNROLLED = [0, 16, 64]  # the steps up to which loops are unrolled; its default also has 512
ATTEMPTS = 4  # schedules that are drawn for one that is new and valid
MUTATED = 0.6  # the share of schedules that change one decision of the fastest one
MOST_CHARACTERS = 1 << 20  # longer sources are dropped


def design_rules(is_strict: bool, is_moved: bool, is_tiled: bool) -> list[Any]:
    """Return MetaSchedule's rules for CPUs.

    Without `is_strict`, all that is not reduced is computed where it is read. With `is_moved`, what is reduced may be
    computed within the loops of its reader. With `is_tiled`, loops with reuse are tiled, which fails for some groups.
    """
    rule = ms.schedule_rule
    reuse = rule.ReuseType("may", [1, 2], "global")
    return [
        rule.InlineConstantScalars(),
        rule.AutoInline(False, True, True, is_strict, is_strict, is_strict),
        rule.AddRFactor(JOBS_PER_CORE, VECTOR_ELEMENTS),
        *([rule.MultiLevelTiling("SSRSRS", None, 64, None, None, reuse)] if is_tiled else []),
        rule.ParallelizeVectorizeUnroll(JOBS_PER_CORE, VECTOR_ELEMENTS, UNROLLED, True),
        *([rule.RandomComputeLocation()] if is_moved else []),
    ]


POSTPROCESSORS = (
    ms.postproc.DisallowDynamicLoop(),
    ms.postproc.RewriteParallelVectorizeUnroll(),
    ms.postproc.RewriteReductionBlock(),
)


@dataclass
class Tuning:
    """The schedules of one group."""

    function: Any
    operations: Emit
    target: Any
    isa: Any
    threads: int
    comment: str
    random: random.Random
    spaces: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    asked: list[Any] = field(default_factory=list)  # the traces of the last answer
    best: tuple[float, Any] | None = None
    reason: str = ""

    def propose(self, count: int) -> list[dict[str, Any]]:
        """Return kernels that were not proposed before, at most `count`."""
        found: list[dict[str, Any]] = []
        self.asked = []
        for _ in range(ATTEMPTS * count):
            if len(found) == count:
                break
            made = self._draw() if self.spaces else None
            if made is None:
                continue
            schedule, lowered = made
            trace = json.dumps(schedule.trace.as_json(), default=_plain)
            found.append({"trace": trace, **vars(lowered)})
            self.asked.append(schedule.trace)
        return found

    def tell(self, times_ns: list[float | None]) -> None:
        """Take the times of the kernels of the last answer."""
        for trace, time_ns in zip(self.asked, times_ns, strict=True):
            if time_ns is not None and (self.best is None or time_ns < self.best[0]):
                self.best = (time_ns, trace)

    def _draw(self) -> tuple[Any, Lowered] | None:
        """Return a schedule with its kernel; None if it is invalid or was proposed before."""
        schedule = s_tir.Schedule(self.function, seed=self.random.randrange(1, 1 << 30))
        try:
            self._trace().apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            if not all(postprocessor.apply(schedule) for postprocessor in POSTPROCESSORS):
                return None
            lowered = lower(schedule.mod, self.target, self.isa, self.operations, self.comment, self.threads)
        except (NotLoweredError, RuntimeError, ValueError, TypeError) as error:
            self.reason = excerpt(error)
            return None
        if lowered.source in self.seen or len(lowered.source) > MOST_CHARACTERS:
            return None
        self.seen.add(lowered.source)
        return schedule, lowered

    def _trace(self) -> Any:
        """Return a trace whose missing decisions are drawn when it is applied."""
        decisions: dict[Any, Any] = {}
        if self.best is not None and self.random.random() < MUTATED:
            trace = self.best[1].simplified(remove_postproc=True)
            decisions = dict(trace.decisions.items())
            if decisions:
                decisions.pop(self.random.choice(list(decisions)))
        else:
            trace = self.random.choice(self.spaces).trace.simplified(remove_postproc=True)
        return s_tir.schedule.Trace(trace.insts, decisions)


def _plain(value: Any) -> Any:
    """Return a value of TVM as plain data."""
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    return list(value) if hasattr(value, "__iter__") else str(value)


def begin(question: dict[str, Any]) -> Tuning:
    """Return the design space of a group."""
    isa, threads = ISAS[question["isa"]], int(question["threads"])
    target = target_of(isa, threads)
    tensors = GroupTensors(parse_graph(question["group"]), isa)
    function, operations = tensors.function().with_attr("global_symbol", "main"), tensors.operations.emit
    tuning = Tuning(function, operations, target, isa, threads, question["group"], random.Random(question["seed"]))
    for is_strict, is_moved, is_tiled in product((False, True), repeat=3):
        rules, posts = design_rules(is_strict, is_moved, is_tiled), list(POSTPROCESSORS)
        generator = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=posts, mutator_probs={})
        context = ms.TuneContext(function, target=target, space_generator=generator, num_threads=1, rand_state=1)
        try:
            tuning.spaces += context.generate_design_space()
        except RuntimeError as error:  # a rule of TVM chose what another rule refuses
            tuning.reason = excerpt(error)
    return tuning


def main() -> None:
    """Answer the questions of the standard input."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    tuning: Tuning | None = None
    answers, sys.stdout = sys.stdout, sys.stderr  # what TVM prints is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any]
        try:
            if "group" in question:
                tuning = begin(question)
            assert tuning is not None
            if "times_ns" in question:
                tuning.tell(question["times_ns"])
            kernels = tuning.propose(question["count"])
            answer = {"kernels": kernels, "reason": tuning.reason}
        except Exception as error:  # noqa: BLE001 - whatever TVM raises excludes only this group
            answer = {"kernels": [], "reason": f"{type(error).__name__}: {excerpt(error)}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
