"""The limits of the search: the time of each step, the number of things it tries, and its optimality gaps.

Constants of cost models, and of single providers and rules, are in the modules that use them.

The defaults were tuned on the models of the benchmark suite. Users need not change them; a test or an
experiment passes other values as `korch.optimize(model, search=SearchLimits(...))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from korch.fields import Ranges, check_fields

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
            "superopt_rounds",
        ),
        (lambda value: value >= 1, "at least 1"),
    ),
    **dict.fromkeys(("patience", "seed"), (lambda value: value >= 0, "at least 0")),
    "timed_sizes": (lambda value: 1 <= value <= 4, "from 1 to 4"),
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
    """Limits of the search, grouped by the module that reads them, which the first text of a group names.

    A number of seconds limits one step, however much of the budget remains. Gaps and shares are fractions of 1.

    Attributes:
        partition: the largest number of primitives in a segment; equal segments are searched once.
            "off": models are not cut; "auto": only models of more than
            `whole_primitives`, into segments of at most `segment_primitives`.
        whole_primitives: the largest number of primitives in a model that is not cut.
        segment_primitives: the largest number of primitives in a segment of a larger model.
        range_factor: a range of sizes has a plan for its largest size n, one for n / `range_factor`, and so on.
        range_least: `range_factor` adds no plans for sizes smaller than this.
        exact_sizes: if windows depend on the size and the ranges have at most this many sizes, each has its own plan.
        gap: the search ends when the lower bound is below the cost of the plan by at most this share
            of the cost.
        max_primitives: `candidate`: largest number of primitives in a candidate.
        max_inputs: largest number of tensors that a candidate reads.
        max_outputs: largest number of tensors that a candidate writes.
        max_candidates: largest number of convex groups that are enumerated for one model.
        max_pools: largest number of reductions over windows in a candidate.
        max_byte_casts: largest number of casts to bytes in a candidate, without casts that are attached to readers.
        max_readers: elementwise primitives with more readers are not attached to them: storing their output may be
            faster.
        layout_growth: layout primitives that enlarge a tensor by more than this factor are not attached to readers.
        max_measured: largest share of the distinct candidates that is measured.
        patience: the search ends after this many rounds of measurements in which neither the plan
            nor the bound improved noticeably.
        solver_workers: threads of the solver.
        solver_seconds: longest time for one solve.
        seed: random seed of the solver, and of the inputs on which plans are checked.
        on_interrupt: the effect of Ctrl-C during the search: "stop" ends the command, and measurements are kept; "keep"
            ends the search and builds the best plan found so far.

        rewrite_share: `pipeline`: share of the budget after which no more alternatives are added.
        enumerate_share: share of the remaining budget after which no more candidates are added.
        check_share: share of the remaining time reserved to check the error of a plan and to search again.
        timed_sizes: number of the sizes that a plan serves at which its kernels are timed, at most 4.
        variants_share: share of the time of a search reserved for plans for other sizes.
        variant_gain: a plan for another size is kept if its time there is at most this share of that of other plans.
        predicted_error: least relative error assumed for times predicted from other sizes: repeated measurements
            of one kernel differ by as much.
        predicted_margin: a kernel is left out at another size if it is slower than the best one there even when its
            predicted time is lowered, and that of the best one raised, by this many times the error.
        fit_share: share of the time of a search reserved to time its plans at several sizes.
        fit_sizes: number of sizes at which these plans are timed.
        fit_rounds: runs at each of these sizes.
        fit_seconds: time for these runs.
        least_fit_rounds: runs at each size even if no time remains.
        checked_flop: limits the sizes, except the largest, at which a plan is checked: most work of the model there.
        checked_sizes: number of sizes at which a plan for a range is compared with the model even without time.
        random_sizes: how many of the sizes at which it is compared are random.
        end_runs: runs of the model assumed for the last stages, at a third of the machine's best rate.
        end_safety: the time reserved for the last stages is this many times their predicted time.

        calibration_samples: `pipeline.precision`: random inputs for calibration.
        calibration_checks: inputs on which less precise plans are checked.
        calibration_most: largest number of samples of a file that are used.
        form_bytes: smaller weights have no less precise form.
        form_seconds: time to determine the errors of forms; products without a known error then have no form.
        form_slack: the forms with the best ratio of saving to error are kept until they exceed the budget by this
            factor.
        form_searches: number of searches with a changed sum of errors, before the model is left as it is.
        form_most: largest allowed error on a few inputs, as a part of the budget: on other inputs it is larger.
        form_aim: a changed sum of errors aims at this part of the budget.
        form_near: a plan that uses at least this part of the budget is not searched again.

        sweeps: `partition`: how often the choice of one alternative per value is repeated over all values.
        alternative_share: what an alternative adds to the size of a segment, in primitives; less than 1, because it
            takes part in fewer kernels.
        least_period: least number of primitives in one period of a repetition.
        least_repetition: shorter periods are combined into one unit, up to about this size.
        near_cut: a period is cut at a place that costs at most this many times the cheapest place.
        kept_bytes: size of the constants computed by rules that stay in memory.
        spilled_bytes: smaller constants are never written to a file.

        superopt_share: `superopt`: its share of a budget.
        superopt_seconds: its time, without a budget.
        superopt_group_seconds: time of the search for one group.
        superopt_gain: least share of its own time, and of the model's, that a group must be able to save.
        superopt_products: most products in a group.
        superopt_primitives: most primitives in a group.
        superopt_steps: most steps of a block graph.
        superopt_first_steps: block graphs with at most this many steps are searched first; they give a time bound for
            the search of longer ones.
        superopt_margin: block graphs that may take up to this many times the time of the best one are found too.
        superopt_cuts: number of cuts of each block graph that are estimated.
        superopt_worth: programs with more than this many times the least estimate are not verified.
        superopt_graphs: block graphs of a group that are verified.
        superopt_rounds: computations over finite fields in which each is compared, two for each random input.
        superopt_programs: programs of a group that are offered.

        plan_rounds: `validation`: rounds in which plans are timed in turn.
        plan_seconds: time for these rounds.
        least_plan_rounds: rounds even if no time remains.
        short_plan_rounds: most rounds of short plans, whose `plan_rounds` take less than ...
        short_plan_seconds: ... this time.
        disturbed_factor: rounds and seconds are extended up to this factor while too few runs are undisturbed.
        build_safety: a plan is built only if this many times its predicted duration remains.
        heavy_bytes: of plans with more weights than this, only two are in memory at a time.
        task_parts: tasks into which the grid points of each thread are cut, so that readers begin when some are done.
        tasks_gain: a plan with tasks is kept if it takes at most this share of the time of the plan with joins.
        suspect_runs: runs in which kernels are timed if the prediction for a plan is wrong.
        suspect_share: kernels that explain this share of the difference are measured again.
        suspect_kernels: most kernels that are measured again.

        first_kernels: `program.solve`: least number of kernels in the first restricted program.
        growth: each further restricted program has this many times the kernels of the last one.
        improve_share: share of the remaining time for a heuristic solve before each exact one.

        free_measurements: `search`: number of candidates that may be measured in a small model,
            whatever `max_measured` says.
        round_candidates: candidates measured in one round in addition to those of the plan.
        same_kind: most of these candidates of one kind.
        batch: candidates measured between two checks of the deadline.
        relax_seconds: time of one linear relaxation.
        least_proof_seconds: time of the last relaxation, if no time remains.
        estimate_rounds: rounds in which estimates choose the candidates to measure.
        least_improvement: share of a plan's cost that measuring a candidate must be expected to
            gain in these rounds.
        noticeable: share of a plan's cost that a round must gain to count for `patience`.
        round_seconds: time of one solve of a round.
        first_seconds: time of a solve that has found no plan yet, however little time remains.
        last_seconds: time of a later solve, if no time remains.
        round_gap: gap at which a round's solve ends.
        combine_seconds: time of the solve over measured candidates only.
        estimate_gap: gap at which a solve by estimates ends.
        confirmations: how often the kernels of a plan are measured again, and a plan is chosen
            again.
        confirm_share: share of the budget that is reserved for these measurements.
        runner_up: the second plan is validated too if it costs at most this many times the best.
        estimate_spread: standard deviation of an estimate's error, in logarithms.
        disagreement: two times of a kernel that differ by a larger factor contradict each other.

        block_measurements: `assembly.blocks`: candidates of a block measured before its first
            interface has a plan.
        interface_measurements: more candidates measured for each further interface.
        refine_measurements: more candidates when an interface is refined; twice as many for a
            repeated block.
        block_seconds: time of the first search of one interface of a block.
        refine_seconds: time of the refinement of one interface; twice as long for a repeated block.
        baseline_seconds: time of the solve for one baseline of a block.
        whole_baseline_seconds: time of the solve for one baseline of a model that is one block.
        block_groups: most groups of a block; if there are more, the block is enumerated with smaller groups.
        fewest_primitives: the limit on the size of groups is not lowered below this.
        choices: how often segments choose their interfaces.
        change_rounds: `assembly.assemble`: how often the layout changes in a choice are
            measured.
        prefer_seconds: time of the choice of interfaces by estimates.
        prefer_gap: gap at which that choice ends.
        explore_rounds: `assembly.explore`: most rounds.
        explore_first_candidates: candidates measured in the first round in addition to those of the plan.
        explore_candidates: the same in later rounds.
        explore_block_share: largest share of these candidates from one block.
        explore_near: from the third round on, an interface whose estimate is more than this many
            times that of the block's best is not estimated again.
        explore_batch_seconds: a round is begun only if at least this time remains for it.
        explore_solve_seconds: time of the solve of one interface by estimates.
        explore_gap: gap at which that solve ends.
        explore_ahead: candidates that are compiled while the next round is chosen.
        explore_interfaces: with more interfaces, exploration is skipped: the programs need too much memory.
        explore_quiet: a round that gains a smaller share is the last.

        extract_seconds: `explanation.extract`: time of the choice of one alternative per value.
        savings_seconds: `explanation.savings`: time of the solve without one rule.
        savings_gap: gap at which that solve ends.
        groupings: `explanation.counterfactual`: other groupings reported per kernel.
        grouping_seconds: time of the solve for one grouping.
        groupings_seconds: time of the solves for all groupings.


    Raises:
        OptionError: a value is out of range.
    """

    partition: str | int = "auto"
    whole_primitives: int = 320
    segment_primitives: int = 120
    range_factor: int = 16
    range_least: int = 16
    exact_sizes: int = 64
    gap: float = 0.005
    max_primitives: int = 24
    max_inputs: int = 10
    max_outputs: int = 2
    max_candidates: int = 100_000
    max_pools: int = 2
    max_byte_casts: int = 3
    max_readers: int = 3
    layout_growth: float = 1.25
    max_measured: float = 0.24
    patience: int = 2
    solver_workers: int = 2
    solver_seconds: float = 60.0
    seed: int = 0
    on_interrupt: Literal["stop", "keep"] = "stop"

    rewrite_share: float = 0.25
    enumerate_share: float = 0.5
    check_share: float = 0.25
    timed_sizes: int = 4
    variants_share: float = 0.3
    variant_gain: float = 0.97
    predicted_error: float = 0.03
    predicted_margin: float = 3.0
    fit_share: float = 0.08
    fit_sizes: int = 9
    fit_rounds: int = 9
    fit_seconds: float = 1.5
    least_fit_rounds: int = 3
    checked_flop: float = 4e10
    checked_sizes: int = 3
    random_sizes: int = 2
    end_runs: int = 8
    end_safety: float = 1.3

    calibration_samples: int = 4
    calibration_checks: int = 2
    calibration_most: int = 16
    form_bytes: int = 1 << 16
    form_seconds: float = 60.0
    form_slack: float = 1.5
    form_searches: int = 3
    form_most: float = 0.9
    form_aim: float = 0.8
    form_near: float = 0.6

    sweeps: int = 8
    alternative_share: float = 0.3
    least_period: int = 8
    least_repetition: int = 40
    near_cut: float = 1.6
    kept_bytes: int = 256 << 20
    spilled_bytes: int = 1 << 18

    superopt_share: float = 0.1
    superopt_seconds: float = 20.0
    superopt_group_seconds: float = 12.0
    superopt_gain: float = 0.003
    superopt_products: int = 3
    superopt_primitives: int = 30
    superopt_steps: int = 14
    superopt_first_steps: int = 6
    superopt_margin: float = 1.5
    superopt_cuts: int = 2
    superopt_worth: float = 1.3
    superopt_graphs: int = 8
    superopt_rounds: int = 4
    superopt_programs: int = 4

    plan_rounds: int = 11
    plan_seconds: float = 4.0
    least_plan_rounds: int = 3
    short_plan_rounds: int = 99
    short_plan_seconds: float = 0.5
    disturbed_factor: int = 3
    build_safety: float = 1.5
    heavy_bytes: int = 512 << 20
    task_parts: int = 2
    tasks_gain: float = 0.99
    suspect_runs: int = 5
    suspect_share: float = 0.8
    suspect_kernels: int = 24

    first_kernels: int = 500
    growth: int = 3
    improve_share: float = 0.2

    free_measurements: int = 300
    round_candidates: int = 48
    same_kind: int = 6
    batch: int = 24
    relax_seconds: float = 10.0
    least_proof_seconds: float = 1.0
    estimate_rounds: int = 5
    least_improvement: float = 0.0005
    noticeable: float = 0.002
    round_seconds: float = 4.0
    first_seconds: float = 10.0
    last_seconds: float = 0.5
    round_gap: float = 0.002
    combine_seconds: float = 3.0
    estimate_gap: float = 0.01
    confirmations: int = 6
    confirm_share: float = 0.06
    runner_up: float = 1.1
    estimate_spread: float = 0.45
    disagreement: float = 1.5

    block_measurements: int = 120
    interface_measurements: int = 16
    refine_measurements: int = 100
    block_seconds: float = 12.0
    refine_seconds: float = 24.0
    baseline_seconds: float = 3.0
    whole_baseline_seconds: float = 10.0
    block_groups: int = 6000
    fewest_primitives: int = 6
    choices: int = 3
    change_rounds: int = 8
    prefer_seconds: float = 2.0
    prefer_gap: float = 0.005
    explore_rounds: int = 12
    explore_first_candidates: int = 24
    explore_candidates: int = 72
    explore_block_share: float = 1 / 3
    explore_near: float = 1.3
    explore_batch_seconds: float = 5.0
    explore_solve_seconds: float = 0.7
    explore_gap: float = 0.03
    explore_ahead: int = 48
    explore_interfaces: int = 60
    explore_quiet: float = 0.004

    extract_seconds: float = 60.0
    savings_seconds: float = 2.0
    savings_gap: float = 0.002
    groupings: int = 6
    grouping_seconds: float = 1.0
    groupings_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)

    def segment_limit(self, primitives: int) -> int | None:
        """Return the most primitives in a segment of a model with `primitives` primitives; None if it is not cut."""
        if self.partition == "auto":
            return self.segment_primitives if primitives > self.whole_primitives else None
        return None if self.partition == "off" else int(self.partition)


DEFAULT_LIMITS = SearchLimits()
