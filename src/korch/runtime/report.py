"""The report of an optimization: how a plan was found, and what was measured about it.

The pipeline makes a `Report`, which an artifact contains as report.json. The explanation, the HTML page,
the comparison of plans and `korch.Executable.report` read its fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from korch.costs.rates import Rates
from korch.equivalence.saturate import RuleReport, SaturationReport
from korch.limits import DISAGREEMENT
from korch.measure.uncompiled import Uncompiled
from korch.numerics import Difference
from korch.primitive.dispute import Dispute
from korch.ranges.cost import Cost
from korch.runtime.record import HostNodeRecord, ModelRecord
from korch.search.result import PlanName, Round
from korch.segments.record import PartitionRecord

CALL_NS = 200_000
"""A run is called from Python, and may take this much longer than the sum of its kernels."""


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """An operator of the model, with the names of its input and output values."""

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of the end-to-end validation of one plan, with times of complete runs.

    Attributes:
        plan: the plan's name.
        kernels: the number of its kernels.
        predicted_ms: the sum of the costs of its kernels.
        expected_ms: the median time of a run as predicted from the samples of its kernels, with the
            10th and 90th percentile; None if a kernel was not measured.
        is_measured: whether all of its kernels were measured.
        measured_ms: the median time, with the 10th and 90th percentile; None if it did not run.
        max_error: the largest error, relative to the largest element; None if it did not run.
        refusal: why it is rejected; "" if it is not.
        disturbed: the number of runs that other processes disturbed.
        is_disturbed: whether the times are estimates because too few runs were undisturbed.
    """

    plan: PlanName
    kernels: int
    predicted_ms: float
    measured_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    max_error: float | None
    refusal: str = ""
    expected_ms: float | None = None
    expected_p10_ms: float | None = None
    expected_p90_ms: float | None = None
    is_measured: bool = True
    disturbed: int = 0
    is_disturbed: bool = False


@dataclass(frozen=True, slots=True)
class OutputError:
    """The error of an output of the plan, and the error of the same output of the model in its own types."""

    output: str
    error: Difference
    given: Difference


@dataclass(frozen=True, slots=True)
class Rival:
    """Another candidate for exactly the primitives of one kernel of the plan."""

    provider: str  # the provider that makes it
    variant: str  # the provider's name for this implementation
    layouts: str  # the layouts of its inputs and outputs
    cost_ns: int  # its measured time, or its bound
    is_measured: bool  # whether the cost is measured
    failure: str = ""  # why it does not run; "" if it does


@dataclass(frozen=True, slots=True)
class GroupedKernel:
    """A kernel of another grouping: its provider and the names of its operations."""

    provider: str
    operations: str


@dataclass(frozen=True, slots=True)
class GroupingRecord:
    """Kernels that could run instead of some kernels of the plan."""

    kernels: tuple[GroupedKernel, ...]  # the kernels that would run
    instead: tuple[int, ...]  # the indices in the plan of the kernels that they would replace
    cost_ns: int  # the cost of `kernels`
    instead_ns: int  # the cost of the replaced kernels


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The runs that other processes disturbed while times were measured."""

    kernel_runs: int = 0  # the number of disturbed runs of kernels, which were dropped
    plan_runs: int = 0  # the number of disturbed runs of complete plans, which were dropped
    kernels: int = 0  # the number of the plan's kernels whose times are estimates, because too few runs remained
    is_plan_disturbed: bool = False  # whether the time of the complete plan is such an estimate


@dataclass(frozen=True, slots=True)
class Suspect:
    """A kernel that explains a part of a wrong prediction."""

    number: int  # its index in the plan
    provider: str  # the provider that made it
    alone_ns: float  # its time when it was measured alone
    again_ns: float  # its time when it was measured again; equal to `alone_ns` if it was not
    in_run_ns: float  # its time within complete runs


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A predicted time of a plan that differs much from the measured one."""

    predicted_ns: float  # the sum over the plan's kernels that were measured
    measured_ns: float  # the median of complete runs; if some kernels were not measured, the share of the measured ones
    again_ns: float  # the sum over these kernels after some were measured again
    is_disturbed: bool  # whether no complete run was undisturbed
    suspects: tuple[Suspect, ...]  # the kernels that explain most of the difference
    unknown: int = 0  # the number of the plan's kernels that were not measured

    @property
    def remains(self) -> bool:
        """Whether the times still differ after kernels were measured again."""
        return disagree(self.again_ns, self.measured_ns)

    def to_text(self) -> str:
        """Return a sentence that describes it."""
        text = (
            f"the kernels were predicted to take {self.predicted_ns / 1e6:.3g} ms together, and "
            f"runs take {self.measured_ns / 1e6:.3g} ms"
        )
        if self.unknown:
            text = (
                f"the measured kernels, all but {self.unknown}, were predicted to take {self.predicted_ns / 1e6:.3g} "
                f"ms together, and take {self.measured_ns / 1e6:.3g} ms in runs"
            )
        rows = ", ".join(
            f"kernel {s.number} ({s.provider}): {s.alone_ns / 1e6:.3g} ms alone, "
            f"{s.again_ns / 1e6:.3g} ms when timed again, {s.in_run_ns / 1e6:.3g} ms in the run"
            for s in self.suspects[:3]
        )
        if not self.remains:
            return (
                f"{text}; timed again, the kernels take {self.again_ns / 1e6:.3g} ms, which is "
                f"kept: optimize again to search with it ({rows})"
            )
        why = "; no run was undisturbed by other processes" if self.is_disturbed else ""
        most = f"most of it is in: {rows}" if rows else "there was no time to see which explain it"
        return f"{text}{why}; {most}"


def disagree(first_ns: float, second_ns: float) -> bool:
    """Return whether one of two times is more than 1.5 times the other."""
    low, high = sorted((first_ns, second_ns))
    return high > DISAGREEMENT * low + CALL_NS


@dataclass(frozen=True, slots=True)
class FormRecord:
    """A product of a plan in less precise types, and the error of the outputs if it were the only such product."""

    name: str
    error: float


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """How a plan uses its error budget."""

    budget: float  # the largest allowed error, relative to the largest element of each output
    error: float  # the largest error of the plan in its check, and on inputs that were not used for calibration
    source: str  # where the inputs for calibration came from
    offered: int  # the number of less precise products that the search could choose from
    forms: tuple[FormRecord, ...] = ()  # the less precise products of the plan
    searches: int = 1  # how often the search ran, each time with another allowed sum of errors


@dataclass(frozen=True, slots=True)
class ScheduleTimes:
    """Times of a plan in which all threads join after each kernel, and in which threads wait for tasks only."""

    joins_ms: float  # the median time with a join after each kernel
    tasks_ms: float  # the median time with tasks
    runs_tasks: bool  # which of the two is kept


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of runs of a plan."""

    median_ms: float  # the median
    p10_ms: float  # the 10th percentile
    p90_ms: float  # the 90th percentile
    # whether too few runs were undisturbed by other processes, so that the times are estimates
    is_disturbed: bool = False


@dataclass(frozen=True)
class Report:
    """How a plan was found. Without arguments it is the report of a plan of unknown origin.

    Attributes:
        status: what is proven about the search's plan; "" if nothing is known of a search.
        predicted_ms: the sum of the costs of that plan's kernels.
        lower_bound_ms: the lower bound of the cost of any plan.
        doubt: why that bound may be too high; "" if nothing speaks for it.
        gap: (predicted_ms - lower_bound_ms) / predicted_ms; None if kernels were not measured.
        calibrated_ms: the lower bound, and `calibrated_gap` the gap, if no unmeasured kernel undercuts its calibrated
            bound, as 998 of 1,000 measured kernels of other models do not; None if that is not known.
        primitives: the number of primitives of the model.
        given_flop: the floating-point operations of the model as given.
        alternatives: the number of alternatives that rules added.
        sets: the number of convex sets that were enumerated; `groups` is the number of sets that were kept.
        limits_hit: limits that ended the enumeration of groups early.
        candidates: the number of candidates; `distinct_candidates` counts equal ones once, of which
            `measured_candidates` were measured and `failed_candidates` do not run.
        timed_kernels: the number of kernels with a measured time, including those for other sizes of a range.
        untimed: the number of the plan's kernels that were not measured for lack of time.
        rules: what each rule did.
        rule_savings_ms: by rule, the additional cost of the best plan without it; None if it is not known.
        rounds: the bound and the best plan over the time of the search.
        recalled: whether the search was done in an earlier run.
        stopped_by_budget: whether the budget ended the search.
        budget_s: the budget; `least_s` is the least budget that suffices, if that is more.
        stages_s: the seconds of each stage.
        idle: the idle share of the usable cores in each stage.
        search_s: the seconds of the stage "orchestrate" by kind of work.
        operators: the model's operators.
        precision: how the error budget was used; None without one.
        partition: the segments of a large model; None if the model was not cut.
        machine: the rates of the machine.
        plan: the name of the plan that is kept; None before plans are built.
        plans: the results of all plans that were built.
        measured_ms: the median time of a run of the plan, in turn with the other plans; `expected_ms` is the time
            predicted from the samples of its kernels.
        fresh: the times of runs of the artifact in a process of their own; None if there was no time for them.
        max_error: the largest error relative to the largest element; `rms_error` is relative to the
            root mean square. `given_error` and `given_rms_error` are the errors of the model as
            given, in its own types.
        output_errors: the errors of each output.
        disturbed: measurements that other processes disturbed.
        discrepancy: the difference of predicted and measured time, if it is large.
        not_compiled: kernels that the compiler rejected.
        provider_faults: the number of groups for which a provider raised an error, by the error with one group.
        schedule: the times of the plan with joins and with tasks; None if they were not compared.
        rivals: by candidate of the plan, other candidates for the same primitives.
        groupings: for each kernel of the plan, other groupings of its primitives.
        provider_reports: lines in which providers report on the search.
        described: by candidate of the plan, lines in which its provider describes the kernel.
        kernels: the number of kernels of the plan; `in_place` is the number of concatenations that need none.
        flop: the floating-point operations of the plan.
        arena_bytes: the size of the memory for intermediate values.
        seconds: the duration of the optimization.
        disputes: the nodes on which references differed; plans were compared with the one that was followed.
        rejected: why the plans of a first search without `strict` were rejected; "" if they were not.
    """

    status: str = ""
    predicted_ms: float = 0.0
    lower_bound_ms: float = 0.0
    doubt: str = ""
    gap: float | None = None
    calibrated_ms: float | None = None
    calibrated_gap: float | None = None
    primitives: int = 0
    given_flop: int = 0
    alternatives: int = 0
    sets: int = 0
    groups: int = 0
    limits_hit: tuple[str, ...] = ()
    candidates: int = 0
    distinct_candidates: int = 0
    measured_candidates: int = 0
    failed_candidates: int = 0
    timed_kernels: int = 0
    untimed: int = 0
    rules: SaturationReport | None = None
    rule_savings_ms: Mapping[str, float | None] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    recalled: bool = False
    stopped_by_budget: bool = False
    budget_s: float | None = None
    least_s: float | None = None
    stages_s: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)
    search_s: Mapping[str, float] = field(default_factory=dict)
    operators: tuple[OperatorRecord, ...] = ()
    precision: PrecisionRecord | None = None
    partition: PartitionRecord | None = None
    machine: Rates = field(default_factory=Rates)
    plan: PlanName | None = None
    plans: tuple[PlanResult, ...] = ()
    measured_ms: float | None = None
    fresh: RunTimes | None = None
    expected_ms: float | None = None
    max_error: float = 0.0
    rms_error: float = 0.0
    given_error: float = 0.0
    given_rms_error: float = 0.0
    output_errors: tuple[OutputError, ...] = ()
    disturbed: Disturbance = field(default_factory=Disturbance)
    discrepancy: Discrepancy | None = None
    not_compiled: tuple[Uncompiled, ...] = ()
    provider_faults: Mapping[str, int] = field(default_factory=dict)
    schedule: ScheduleTimes | None = None
    rivals: Mapping[str, tuple[Rival, ...]] = field(default_factory=dict)
    groupings: tuple[tuple[GroupingRecord, ...], ...] = ()
    provider_reports: tuple[str, ...] = ()
    described: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: int = 0
    in_place: int = 0
    flop: int = 0
    arena_bytes: int = 0
    seconds: float = 0.0
    disputes: tuple[Dispute, ...] = ()
    rejected: str = ""

    @property
    def is_known(self) -> bool:
        """Whether anything is known of a search."""
        return bool(self.status)

    @property
    def times(self) -> RunTimes | None:
        """The times of runs to rely on: in a process of their own or, without these, in turn with other plans."""
        if self.fresh is not None:
            return self.fresh
        for row in self.plans:
            if row.plan is self.plan and row.measured_ms is not None:
                spread = row.p10_ms or row.measured_ms, row.p90_ms or row.measured_ms
                return RunTimes(row.measured_ms, *spread, row.is_disturbed)
        return None

    @property
    def rule_reports(self) -> tuple[RuleReport, ...]:
        """What each rule did; empty if that is not known."""
        return () if self.rules is None else self.rules.rules


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The time of a kernel of a plan as a function of the sizes of a range."""

    kernel: int  # its number in the plan
    provider: str  # the provider that made it
    cost: Cost  # the cost function


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """What is known of the plan that runs at one size of a range."""

    sizes: str  # the size of each dimension
    plan: str  # the key of the plan's report
    sum_ms: float  # the sum of the times of its kernels there
    best_ms: float  # the least such sum of any plan of the kernels that were measured there
    lower_bound_ms: float  # a lower bound of the sum of any plan that was considered there
    gap: float  # (sum_ms - lower_bound_ms) / sum_ms


@dataclass(frozen=True, slots=True)
class ShapedReport:
    """The report of an executable with several plans.

    Attributes:
        plans: the report of each plan, by the shapes of the inputs.
        weights_bytes: the sum of the sizes of all plans' weights; `shared_weights_bytes` is their size in
            memory, where plans share weights.
        kernels: the number of all plans' kernels; `shared_kernels` is the number of different kernels.
        costs: for plans for ranges, the times of kernels as functions of the sizes, with the same keys as `plans`.
        sizes: for plans for ranges, the bound and the gap at each size at which kernels were measured.
    """

    plans: Mapping[str, Report]
    weights_bytes: int
    shared_weights_bytes: int
    kernels: int
    shared_kernels: int
    costs: Mapping[str, tuple[KernelCost, ...]] = field(default_factory=dict)
    sizes: tuple[SizeRecord, ...] = ()


@dataclass(frozen=True)
class HostedReport:
    """The report of an executable with segments on the host.

    Attributes:
        host: the nodes that the host runs.
        segments: the reports of the native segments.
        disputes: the nodes outside of native segments on which references differed.
        seconds: the time of the optimization.
        model: the model that it was built from.
    """

    host: tuple[HostNodeRecord, ...] = ()
    segments: tuple[Report, ...] = ()
    disputes: tuple[Dispute, ...] = ()
    seconds: float = 0.0
    model: ModelRecord = field(default_factory=ModelRecord)


AnyReport = Report | ShapedReport | HostedReport
