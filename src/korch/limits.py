"""The limits of the search that users, experiments and tests change.

The defaults were tuned on the models of the benchmark suite. Other values are given as
`korch.optimize(model, search=SearchLimits(...))`. All other limits are constants beside the code that reads them.
"""

from dataclasses import dataclass
from typing import Literal

from korch.records.fields import Ranges, check_fields

WHOLE_PRIMITIVES = 320  # the largest number of primitives in a model that is not cut
SEGMENT_PRIMITIVES = 120  # the largest number of primitives in a segment of a larger model
DISAGREEMENT = 1.5  # two times of a kernel that differ by a larger factor contradict each other

_RANGES: Ranges = {
    **dict.fromkeys(
        (
            "max_primitives",
            "max_inputs",
            "max_outputs",
            "max_candidates",
            "solver_workers",
            "range_least",
            "exact_sizes",
        ),
        (lambda value: value >= 1, "at least 1"),
    ),
    **dict.fromkeys(("patience", "seed"), (lambda value: value >= 0, "at least 0")),
    "range_factor": (lambda value: value >= 2, "at least 2"),
    "max_measured": (lambda value: value >= 0, "a share, at least 0"),
    "solver_seconds": (lambda value: value > 0, "a number of seconds greater than 0"),
    "gap": (lambda value: 0 <= value < 1, "a share, at least 0 and less than 1; 0.05 is 5 %"),
    "partition": (
        lambda value: value in ("auto", "off") or (isinstance(value, int) and value > 0),
        "'auto', 'off', or the largest number of primitives in a segment",
    ),
}


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of the search. Gaps and shares are fractions of 1.

    Attributes:
        partition: the largest number of primitives in a segment; equal segments are searched once.
            "off": models are not cut; "auto": only models of more than
            `WHOLE_PRIMITIVES`, into segments of at most `SEGMENT_PRIMITIVES`.
        range_factor: a range of sizes has a plan for its largest size n, one for n / `range_factor`, and so on.
        range_least: `range_factor` adds no plans for sizes smaller than this.
        exact_sizes: if windows depend on the size and the ranges have at most this many sizes, each has its own plan.
        gap: the search ends when the lower bound is below the cost of the plan by at most this share
            of the cost.
        max_primitives: largest number of primitives in an enumerated group, without those that are attached to readers.
        max_inputs: largest number of tensors that a candidate reads.
        max_outputs: largest number of tensors that a candidate writes.
        max_candidates: largest number of convex sets of primitives that are enumerated for one block.
        max_byte_casts: largest number of casts to bytes in a candidate, without casts that are attached to readers.
        max_measured: largest share of the distinct candidates that is measured.
        patience: the search ends after this many rounds of measurements in which neither the plan
            nor the bound improved noticeably.
        solver_workers: threads of the solver.
        solver_seconds: longest time for one solve.
        seed: random seed of the solver, and of the inputs on which plans are checked.
        on_interrupt: the effect of Ctrl-C during the search: "stop" ends the command, and measurements are kept; "keep"
            ends the search and builds the best plan found so far.

        fit_rounds: runs at each size at which costs are fitted.

        form_bytes: smaller weights have no less precise form.
        form_slack: the forms with the best ratio of saving to error are kept until they exceed the budget by this
            factor.

        kept_bytes: size of the constants computed by rules that stay in memory.

        free_measurements: number of candidates that may be measured in a small model,
            whatever `max_measured` says.
        round_candidates: candidates measured in one round in addition to those of the plan.
        same_kind: most of these candidates of one kind.
        batch: candidates measured between two checks of the deadline.

        groupings: other groupings reported per kernel.

    Raises:
        OptionError: a value is out of range.
    """

    partition: str | int = "auto"
    range_factor: int = 16
    range_least: int = 16
    exact_sizes: int = 64
    gap: float = 0.005
    max_primitives: int = 24
    max_inputs: int = 10
    max_outputs: int = 2
    max_candidates: int = 100_000
    max_byte_casts: int = 3
    max_measured: float = 0.24
    patience: int = 2
    solver_workers: int = 2
    solver_seconds: float = 60.0
    seed: int = 0
    on_interrupt: Literal["stop", "keep"] = "keep"

    fit_rounds: int = 9

    form_bytes: int = 1 << 16
    form_slack: float = 1.5

    kept_bytes: int = 256 << 20

    free_measurements: int = 300
    round_candidates: int = 48
    same_kind: int = 6
    batch: int = 24

    groupings: int = 6

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)

    def segment_limit(self, primitives: int) -> int | None:
        """Return the most primitives in a segment of a model with `primitives` primitives; None if it is not cut."""
        if self.partition == "auto":
            return SEGMENT_PRIMITIVES if primitives > WHOLE_PRIMITIVES else None
        return None if self.partition == "off" else int(self.partition)


DEFAULT_LIMITS = SearchLimits()
