"""What the stages of one optimization share: the options, the progress, the division of the time budget."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from korch.candidate.candidate import Candidate
from korch.errors import KorchError
from korch.frontend.onnx import ModelSource
from korch.frontend.operator import OperatorGraph
from korch.measure.meter import AnyMeter
from korch.options import Options
from korch.pipeline.least import Least, announce
from korch.pipeline.results import SplitModel, StageResults
from korch.primitive.dispute import Disputes, noted_disputes
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.masked import Masked
from korch.report.progress import Progress, Update
from korch.runtime.build import model_record
from korch.runtime.record import ModelRecord
from korch.search.ledger import Ledger
from korch.search.result import Round
from korch.system.cores import idle_seconds, usable_cores
from korch.system.deadline import Deadline
from korch.validation.fresh import FRESH_S
from korch.validation.timing import BUILD_SAFETY
from korch.validation.validate import BUILD_KERNELS, WEIGHTS_BYTES

ENUMERATE_SHARE = 0.2  # share of the remaining budget after which no more candidates are added
END_RUNS = 8  # runs of the model assumed for the last stages, at a third of the machine's best rate
END_SAFETY = 1.3  # the time reserved for the last stages is this many times their predicted time
RANGE_SAFETY = 1.3  # this many times more for ranges: kernels with masks have more code, and plans run at several sizes

logger = logging.getLogger("korch.pipeline")

PRIMITIVES_PER_KERNEL = 3
"""A lower estimate of the number of primitives in a kernel of a plan."""


TASKS_SHARE = 0.1
"""The largest part of the budget that is reserved to build and time a plan as tasks, too."""

LATE_SHARE = 0.1
"""How much later than the budget a compiler is given up, as a part of the budget; ending takes another second."""


@dataclass(frozen=True)
class Template:
    """The plan of a model for one size, whose kernels are also used for other sizes."""

    graph: PrimitiveGraph  # the model at that size, with its alternatives
    steps: tuple[Candidate, ...]  # the kernels in an order in which they can run


@dataclass(eq=False, repr=False)
class Run:
    """What the stages of one optimization share, and their results."""

    options: Options  # how to optimize
    shapes: Mapping[str, tuple[int, ...]]  # sizes for inputs with unknown dimensions, by input name
    progress: Progress  # called for each stage and for its steps
    # a path, the bytes of an ONNX file, an onnx.ModelProto, or an operator graph
    model: ModelSource | OperatorGraph | None = None
    started_s: float = field(default_factory=time.monotonic)
    given: Deadline | None = None  # the time at which the artifact must be on disk; None if it follows from the budget
    masked: Masked | None = None  # the model's primitives for all sizes up to these, if the executable is for a range
    template: Template | None = None  # the plan of another size whose kernels are used, instead of a search
    # called with the plan that the search found, if other sizes use its kernels
    keep: Callable[[Template], None] | None = None
    end_s: float = 0.0  # predicted seconds to build, check and write the plan
    # the budget that suffices to time the kernels of a first plan, if the given budget is too short for it
    timing_s: float | None = None
    todo: Collection[str] = ()  # the names of the stages that run
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the run ends
    stage_seconds: dict[str, float] = field(default_factory=dict)  # seconds of each stage that has ended
    idle_shares: dict[str, float] = field(default_factory=dict)  # idle share of the usable cores, by stage
    disputes: Disputes = field(default_factory=dict)  # the nodes on which references differed in these stages
    results: StageResults = field(default_factory=StageResults)  # the results of the stages that have ended

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report the start of a stage, and measure its time; name it if the memory does not suffice."""
        begun, before_s = time.monotonic(), idle_seconds()
        self.tell(name, "")
        try:
            with noted_disputes() as disputes:
                yield
        except MemoryError as error:
            raise KorchError(
                f"the memory of this process does not suffice for the stage {name!r} ({error or 'no size known'})",
                where=self.results["frontend"].name if "frontend" in self.results else "",
                hint="Give it more, for example with `ulimit -v`, or optimize for smaller inputs",
            ) from error
        self.disputes |= disputes
        self.stage_seconds[name] = spent_s = time.monotonic() - begun
        idle_s = idle_seconds()
        if idle_s is not None and before_s is not None and spent_s:
            self.idle_shares[name] = min(1.0, (idle_s - before_s) / (spent_s * usable_cores()))
        logger.debug("%s took %.2f s", name, self.stage_seconds[name])

    def tell(self, stage: str, text: str, whole: Round | None = None) -> None:
        """Report a step of a stage; `whole`: the state of the search of the whole model."""
        times_ns = () if whole is None else (whole.incumbent_ns, whole.expected_ns)
        self.progress(Update(stage, text, *(None if ns is None else ns / 1e6 for ns in times_ns)))

    @cached_property
    def deadline(self) -> Deadline:
        """The time at which the artifact must be on disk."""
        return self.given or Deadline.after(self.options.budget_s, self.started_s)

    @cached_property
    def record(self) -> Callable[[], ModelRecord]:
        """Returns the record of the model; from the first use on, its file is hashed beside the stages."""
        if not isinstance(self.model, str | Path):
            return ModelRecord
        pool = ThreadPoolExecutor(1)
        found = pool.submit(model_record, self.model)
        pool.shutdown(wait=False)
        return found.result

    @property
    def least_s(self) -> float | None:
        """The least sufficient budget, if the given budget is too short."""
        return self.deadline.whole.least_s or None

    @property
    def schedule(self) -> str:
        """The schedule: "joins", "tasks", or "fastest" to time both ways.

        By default both are timed if a plan for one size runs on several CPU threads and times are measured. For a
        range it is "joins": kernels that leave out elements that smaller sizes do not need have no tasks, and a range
        has many plans to build.
        """
        options = self.options
        if options.schedule != "auto":
            return options.schedule
        is_range = self.masked is not None or self.template is not None or self.keep is not None
        return "joins" if is_range or options.is_cuda or not options.measure or options.threads == 1 else "fastest"

    @property
    def build_deadline(self) -> Deadline:
        """The time at which building, checking and writing the plan must start."""
        return self.deadline.before(self.end_s)

    @property
    def last_deadline(self) -> Deadline:
        """The time at which a compiler that does not compute is given up; an interrupt does not change it.

        It does not depend on the announced least: a compiler that computes has more time anyway.
        """
        budget_s, at_s = self.options.budget_s, self.deadline.at_s
        return Deadline() if budget_s is None or at_s is None else Deadline(at_s + LATE_SHARE * budget_s)

    def expect(self, least: Least) -> None:
        """Reserve the time of the last stages, and warn if the budget is less than the least."""
        self.end_s = least.end_s  # kernels are compiled within the search
        if self.template is None and self.keep is None:  # else its part of the budget follows from its size
            announce(least, self.options.budget_s, self.deadline)

    def check_budget(self, ledger: Ledger, compile_s: float) -> None:
        """Say which budget suffices if no time is left to time the kernels of a first plan.

        `compile_s`: predicted seconds to compile these kernels.
        """
        budget_s, left_s = self.options.budget_s, self.deadline.left_s
        needed_s = compile_s + self.end_s
        if self.least_s or self.timing_s or budget_s is None or left_s is None or needed_s <= left_s:
            return
        # The search for candidates takes a part of any budget, so a longer one leaves only the rest of it.
        spent_s = budget_s - left_s
        self.timing_s = max(spent_s + needed_s, needed_s / (1 - ENUMERATE_SHARE))
        timed = ledger.timed_kernels
        known = f"the measured times of {timed} kernels and by " if timed else ""
        logger.warning(
            f"no time is left to time all kernels of a first plan, so it is chosen by {known}estimates; a budget of "
            f"about {self.timing_s:.0f} s suffices"
        )

    def predict_end_s(self, split: SplitModel, meter: AnyMeter) -> float:
        """Return the predicted seconds to build, check and write a plan, with a margin."""
        kernels = BUILD_KERNELS + len(split.graph.primitives) / PRIMITIVES_PER_KERNEL
        build_s = meter.pace.predict_s("build", kernels + 2 * split.weights_bytes / WEIGHTS_BYTES)
        work_flop = split.graph.total_flop * (self.masked.share if self.masked is not None else 1)
        run_s = 3 * work_flop / meter.rates().rate_flop_per_s * meter.pace.slowness
        budget_s = self.options.budget_s or math.inf
        tasks_s = BUILD_SAFETY * build_s if self.schedule == "fastest" else 0.0
        end_s = END_SAFETY * (build_s + END_RUNS * run_s) + min(tasks_s, TASKS_SHARE * budget_s)
        end_s *= RANGE_SAFETY if self.masked is not None else 1.0
        return end_s + FRESH_S * (budget_s >= 10 * FRESH_S)
