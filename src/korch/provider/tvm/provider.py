"""The provider of kernels that TVM's MetaSchedule tunes.

A group is tuned when the search asks for its kernel for the first time, so that the search decides where the seconds
are spent. Each schedule is lowered to LLVM IR (`lower.py`), compiled and timed as a kernel of Korch. The best one is
stored with TVM's record of its schedule, and later searches take it from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from korch.candidate.candidate import Candidate, Group, Late, Offer, Refusal
from korch.candidate.shape import FUSED, around
from korch.errors import KorchError
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import PadAttributes, TakeAttributes
from korch.primitive.text import format_graph
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.provider import Facts, Kernel, Threading, named_kernel
from korch.provider.tvm.process import LateError, Proposal, Tuner, tvm_version
from korch.records import plain, read_record
from korch.system.content_name import content_name
from korch.system.deadline import Deadline
from korch.target import Target
from korch.tile.ir.growth import grows_too_large
from korch.tile.llvm.arithmetic import KIND, NARROW, OPS

TRIALS, ROUND = 32, 8
"""The most kernels that are timed for a group, and how many of them before the next ones are drawn."""

SHARE, LEAST_SECONDS = 0.125, 1.0
"""The part of the seconds left that one group gets, and the seconds below which no group is begun."""

ROUND_SECONDS = 4.0
"""The time that compiling and timing the kernels of a round may take at least; a third of it goes to timing."""

PATIENCE = 2
"""How many times as long TVM may take for the kernels of a round before its process is ended."""

MOST_PRODUCT_FLOP = 1 << 25
"""The most operations of a matrix product that is tuned; the paper's prototype also gives larger ones to libraries."""


Timed = Callable[[Sequence[Candidate], dict[str, Kernel], Deadline], Sequence[int | str | None]]
"""Compiles and times the kernels of candidates, given by key. Returns nanoseconds for each, the reason why it fails, or
None if it was not timed in time."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of tuning a group."""

    proposal: Proposal | None  # the fastest kernel; None if there is none
    reason: str = ""  # why there is none
    time_ns: int = 0
    trials: int = 0  # how many kernels were timed
    seconds: float = 0.0


@dataclass
class TvmProvider:
    """Offers groups in plain layouts, and tunes their kernels when they are asked for.

    Raises:
        ImportError: TVM is not installed.
    """

    facts: Facts
    timed: Timed
    seconds: float  # for all groups
    deadline: Deadline = field(default_factory=Deadline)
    tuner: Tuner = field(default_factory=Tuner)
    name = "tvm"
    group_shapes = (FUSED, around("matmul"))

    def __post_init__(self) -> None:
        self.version = f"{tvm_version()}-{content_version('provider/tvm')}"
        self.known: dict[str, Tuned] = {}
        self.spent_s = 0.0
        self.tuned = self.trials = self.late = 0  # groups and kernels of this search

    def close(self) -> None:
        """End TVM's process."""
        self.tuner.close()

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer a group in plain layouts."""
        reason = refusal_of(group)
        return Refusal(reason) if reason else (Offer(*group.plain_layouts, is_loop_nest=True),)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the fastest kernel that was found; tune the group if that was not done before."""
        found = self.recalled(group) or self._tune(group, offer, target)
        if found is None:
            self.late += 1
            return Late("no time is left to tune it with TVM")
        return Refusal(f"TVM: {found.reason}") if found.proposal is None else kernel_of(found.proposal)

    def recalled(self, group: Group) -> Tuned | None:
        """Return the result of tuning a group in this search or an earlier one; None if there is none."""
        if group.key not in self.known:
            text = self.facts.fact(self._fact(group))
            found = None if text is None else read_tuned(text)
            if found is None:
                return None
            self.known[group.key] = found
        return self.known[group.key]

    def keep(self, candidates: Sequence[Candidate], answer: Callable[[str, object, Callable[[], str]], str]) -> None:
        """Let a ledger record the kernels of a plan; a replay takes them from there."""
        for candidate in {c.group.key: c for c in candidates if c.provider == self.name}.values():
            group = candidate.group

            def text(group: Group = group) -> str:
                found = self.recalled(group)
                return "" if found is None else tuned_text(found)

            found = read_tuned(answer("tvm", group.key, text))
            if found is not None:
                self.known[group.key] = found

    def _fact(self, group: Group) -> str:
        return f"tvm {self.version} {group.key}"

    def _tune(self, group: Group, offer: Offer, target: Target) -> Tuned | None:
        """Tune a group and store the result; None if there is no time."""
        begun_s = time.monotonic()
        left_s, ends_s = self.seconds - self.spent_s, self.deadline.left_s
        left_s = left_s if ends_s is None else min(left_s, ends_s / 2)
        if left_s < LEAST_SECONDS:
            return None
        tuning = _Tuning(self, group, offer, target, self.deadline.until(begun_s + left_s))
        tuning.run()
        proposal, time_ns = tuning.best or (None, 0)
        reason = "" if tuning.best else tuning.reason
        found = Tuned(proposal, reason, time_ns, tuning.trials, round(time.monotonic() - begun_s, 3))
        self.spent_s += found.seconds
        self.tuned += 1
        self.trials += tuning.trials
        if tuning.is_late and proposal is None:
            return None
        self.known[group.key] = found
        self.facts.put_fact(self._fact(group), tuned_text(found))
        return found

    def describe(self, group: Group, offer: Offer) -> tuple[str, ...]:
        """Return how a kernel was tuned, with TVM's record of its schedule."""
        found = self.known.get(group.key)
        if found is None or found.proposal is None:
            return ()
        return (
            f"tuned by TVM {tvm_version()} (MetaSchedule): the fastest of {found.trials} kernels in "
            f"{found.seconds:.1f} s, {found.time_ns / 1e3:.1f} us when it was tuned",
            f"its trace: {found.proposal.trace}",
        )

    def report(self) -> tuple[str, ...]:
        """Return how many groups were tuned in this search, and in which time; nothing if no kernel was asked for."""
        if not (self.tuned or self.known or self.late):
            return ()
        late = f"; no time was left for {self.late} groups" if self.late else ""
        return (
            f"tvm: {self.tuned} groups tuned in {self.spent_s:.1f} s, {self.trials} kernels timed, "
            f"{len(self.known)} groups known{late}",
        )


@dataclass
class _Tuning:
    """The tuning of one group."""

    provider: TvmProvider
    group: Group
    offer: Offer
    target: Target
    last: Deadline  # the end for all groups; this one gets a share of the time until then, and begins no round later
    best: tuple[Proposal, int] | None = None  # the fastest kernel with its time in nanoseconds
    reason: str = "no schedule is valid"  # why there is none
    trials: int = 0  # how many kernels were timed
    is_late: bool = False  # whether time was missing

    def run(self) -> None:
        """Time rounds of kernels."""
        target, tuner = self.target, self.provider.tuner
        question: dict[str, object]
        question = {"group": format_graph(self.group.body), "isa": target.isa, "threads": target.threads, "seed": 0}
        try:
            tuner.begin(self.last)
            end = self.last.less(1 - SHARE)
            seconds = max(ROUND_SECONDS, end.left_s or 0.0)
            while question and self.trials < TRIALS and (not self.trials or not end.is_over):
                question["count"] = ROUND
                proposals, reason = tuner.ask(question, self.last.until(time.monotonic() + PATIENCE * seconds))
                self.reason = reason or self.reason
                question = self._timed(proposals, self.last.until(time.monotonic() + seconds)) if proposals else {}
        except KorchError as error:
            self.reason, self.is_late = error.what, isinstance(error, LateError)

    def _timed(self, proposals: Sequence[Proposal], end: Deadline) -> dict[str, object]:
        """Time kernels; return what to tell TVM, nothing if none of them has a time."""
        kernels = [kernel_of(proposal) for proposal in proposals]
        trials = [
            Candidate(
                self.group,
                self.provider.name,
                replace(self.offer, variant=content_name("trial", kernel.source)),
                self.provider.version,
            )
            for kernel in kernels
        ]
        answers = self.provider.timed(trials, {c.key: k for c, k in zip(trials, kernels, strict=True)}, end)
        timed = [(p, ns) for p, ns in zip(proposals, answers, strict=True) if isinstance(ns, int)]
        self.is_late = self.is_late or None in answers
        self.reason = next((answer for answer in answers if isinstance(answer, str)), self.reason)
        self.best = min((*([self.best] if self.best else []), *timed), key=lambda pair: pair[1], default=None)
        self.trials += len(timed)
        return {"times_ns": [ns if isinstance(ns, int) else None for ns in answers]} if timed else {}


def kernel_of(proposal: Proposal) -> Kernel:
    """Return a proposed kernel."""
    threading = Threading.TEAM if proposal.is_parallel else Threading.CALLER
    return named_kernel(proposal.source, workspace_bytes=proposal.workspace_bytes, threading=threading)


def tuned_text(tuned: Tuned) -> str:
    """Return a result as the text that is stored."""
    return json.dumps(plain(tuned))


def read_tuned(text: str) -> Tuned | None:
    """Return the result that a text represents; None if the text is damaged."""
    try:
        return read_record(Tuned, json.loads(text), "tuned kernel")
    except (ValueError, TypeError):
        return None


def refusal_of(group: Group) -> str:
    """Return why TVM gets no such group; "" if it does."""
    body = group.body
    if not body.primitives:
        return "it changes a layout only"
    for type_ in body.types:
        if type_.dtype not in KIND or type_.dtype in NARROW:
            return f"elements of type {type_.dtype.value}"
        if not 0 < type_.size < 1 << 31:
            return f"a value of {type_.size} elements"
    if grows_too_large(body):
        return "its text would be too long"
    return next(filter(None, (_refused(body, primitive) for primitive in body.primitives)), "")


def _refused(body: PrimitiveGraph, primitive: Primitive) -> str:
    """Return why TVM gets no such primitive; "" if it does."""
    category, source = primitive.row.category, body.types[primitive.inputs[0]]
    if category is Category.ELEMENTWISE:
        return "" if primitive.op in OPS else f"the operation {primitive.op}"
    if primitive.op == "matmul":
        is_large = body.work_flop(primitive) > MOST_PRODUCT_FLOP
        return "its product is large" if is_large else "" if source.dtype is DType.F32 else "its product is not float32"
    if category in (Category.LINEAR, Category.OPAQUE):
        return f"the operation {primitive.op}"
    match primitive.attributes:
        case TakeAttributes() as take if not take.repeats:
            return "it takes elements by a table"
        case PadAttributes(before, after, mode) if mode in ("reflect", "wrap"):
            is_short = any(max(b, a) >= n for b, a, n in zip(before, after, source.shape, strict=True) if b or a)
            return "it pads by wrapping around" if mode == "wrap" or is_short else ""
    return ""
