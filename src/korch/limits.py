"""The limits of the search: how long a step may take, how many things it tries, and how close its result must be.

Constants of models of costs, and of single providers and rules, stay in the modules that use them.

The defaults were tuned on the models of the benchmark suite. Users need none of them; a test or an
experiment passes others as `korch.optimize(model, search=SearchLimits(...))`.
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
    """Limits of the search, by the module that reads them.

    Seconds bound one step, whatever the budget leaves. Gaps and shares are parts of 1.

    Attributes:
        partition: the largest number of primitives in a segment; equal segments are searched once.
            "off": models are not cut; "auto": only models of more than
            `whole_primitives`, into segments of at most `segment_primitives`.
        whole_primitives: the largest number of primitives in a model that is not cut.
        segment_primitives: the largest number of primitives in a segment of a larger model.
        range_factor: of a range of sizes there is a plan for the largest, for that part of it, and so on.
        range_least: the smallest size that has a plan only because of `range_factor`.
        exact_sizes: if windows depend on the size, the most sizes of ranges that have a plan each.
        gap: the search ends when the bound is less than the cost of the plan by at most this share
            of the cost.
        max_primitives: `candidate`: largest number of primitives in a candidate.
        max_inputs: largest number of tensors that a candidate reads.
        max_outputs: largest number of tensors that a candidate writes.
        max_candidates: largest number of convex groups that are enumerated for one model.
        max_pools: largest number of reductions over windows in a candidate.
        max_byte_casts: largest number of casts to bytes in a candidate, without those that come with their readers.
        max_readers: elementwise primitives with more readers do not come with these: it may pay to store their output.
        layout_growth: layout primitives that enlarge a tensor by more than this factor do not come with their readers.
        max_measured: largest share of the distinct candidates that is measured.
        patience: the search ends after this many rounds of measurements in which neither the plan
            nor the bound improved noticeably.
        solver_workers: threads of the solver.
        solver_seconds: longest time for one solve.
        seed: of the solver, and of the random inputs that plans are checked on.
        on_interrupt: the effect of Ctrl-C during the search: "stop" ends the command, and measurements are kept; "keep"
            ends the search and builds the best plan found so far.

        rewrite_share: `pipeline`: share of the budget after which no more alternatives are added.
        enumerate_share: share of the remaining budget after which no more candidates are added.
        side_by_side_share: share of the budget that is reserved for concurrent kernels, rival plans and explanations.
        side_by_side_seconds: longest search for kernels that run concurrently.
        least_side_by_side_seconds: with less time, this search is skipped.
        check_share: share of the time that is left to check the error of a plan, and to search again.
        timed_sizes: sizes among those that a plan serves at which its kernels are timed, at most 4.
        variants_share: share of the time of a search that is left for plans for other sizes.
        variant_gain: a plan for another size is kept if it takes at most this share of the time of the others there.
        predicted_error: least relative error of times that are predicted by those at other sizes: repeated measurements
            of one kernel differ by as much.
        predicted_margin: a kernel is left out at another size if it loses even when it takes this number of errors
            less, and the best one as many more.
        fit_share: share of the time of a search that is left to time its plans at several sizes.
        fit_sizes: sizes at which they are timed.
        fit_rounds: runs at each size.
        fit_seconds: time for them.
        least_fit_rounds: runs even if no time is left.
        checked_flop: the most work of the model at these sizes, but for the largest.
        checked_sizes: sizes at which a plan for a range is compared with the model even if no time is left.
        random_sizes: random sizes among those at which it is compared.
        end_runs: runs of the model in the last stages, at a third of the machine's best rate.
        end_safety: factor between the predicted time of the last stages and the time reserved for them.

        calibration_samples: `pipeline.precision`: random inputs for calibration.
        calibration_checks: inputs on which less precise plans are checked.
        calibration_most: samples of a file that are used.
        form_bytes: weights of fewer bytes have no less precise form.
        form_seconds: time for the errors of forms; products whose errors are not known then have none.
        form_slack: the forms with the best ratio of saving to error are kept until they exceed the budget by this
            factor.
        form_searches: searches with another sum of errors, before the model is left as it is.
        form_most: largest part of the budget that the error on a few inputs may be: it is larger on others.
        form_aim: part of the budget at which a changed sum of errors aims.
        form_near: a plan with at least this part of the budget is not searched again.

        sweeps: `partition`: times that each value's choice of one alternative is looked at.
        alternative_share: what an alternative adds to the size of a segment, in primitives: it takes part in fewer
            kernels.
        least_period: fewest primitives of a repetition.
        least_repetition: shorter repetitions are taken several at a time, up to about this size.
        near_cut: a period is cut at a place at most this many times as dear as the cheapest.
        kept_bytes: constants computed by rules that stay in memory.
        spilled_bytes: smaller constants are never written to a file.

        superopt_share: `superopt`: its share of a budget.
        superopt_seconds: its time, without a budget.
        superopt_group_seconds: the search for one group.
        superopt_gain: least part of its time, and of the model's, that a group must be able to save.
        superopt_products: products in a group.
        superopt_primitives: primitives in a group.
        superopt_steps: steps of a block graph.
        superopt_first_steps: shorter block graphs are found before longer ones, which then have a bound.
        superopt_margin: block graphs that may take this many times the time of the best one are found.
        superopt_cuts: cuts of each block graph that are estimated.
        superopt_worth: programs with more than this many times the least estimate are not verified.
        superopt_graphs: block graphs of a group that are verified.
        superopt_rounds: computations over finite fields in which each is compared, two for each random input.
        superopt_programs: programs of a group that are offered.

        plan_rounds: `validation`: rounds in which plans are timed in turn.
        plan_seconds: time for them.
        least_plan_rounds: rounds even if no time is left.
        short_plan_rounds: most rounds for plans that take so little time that `plan_rounds` end before ...
        short_plan_seconds: ... this time.
        disturbed_factor: this many times the rounds and seconds are run while too few runs are undisturbed.
        build_safety: a plan is built only if this many times its predicted duration is left.
        heavy_bytes: of plans with more weights, only two are in memory at a time.
        task_parts: tasks into which the grid points of each thread are cut: others may begin when some are done.
        tasks_gain: tasks are kept if a run takes at most this part of the time with joins.
        suspect_runs: runs in which kernels are timed if a prediction is wrong.
        suspect_share: kernels that explain this share of the difference are measured again.
        suspect_kernels: most of these.

        first_kernels: `program.solve`: least number of kernels in the first restricted program.
        growth: each further restricted program has this many times the kernels of the last one.
        improve_share: share of the time left for a heuristic solve before each exact one.

        free_measurements: `search`: candidates of a small model that may be measured whatever
            `max_measured` says.
        round_candidates: candidates measured in one round beside those of the plan.
        same_kind: most of these of one kind.
        batch: candidates measured between two checks of the deadline.
        relax_seconds: one linear relaxation.
        least_proof_seconds: the last relaxation, where no time is left.
        estimate_rounds: rounds in which estimates choose what is measured.
        least_improvement: share of a plan's cost that measuring a candidate must be expected to
            gain in these rounds.
        noticeable: share of a plan's cost that a round must gain to count for `patience`.
        round_seconds: one solve of a round.
        first_seconds: a solve that has found no plan yet, whatever time is left.
        last_seconds: a later solve, where no time is left.
        round_gap: gap at which a round's solve ends.
        combine_seconds: the solve over measured candidates only.
        estimate_gap: gap at which a solve by estimates ends.
        confirmations: times that the kernels of a plan are measured again, and a plan is chosen
            again.
        confirm_share: share of the budget that is reserved for it.
        runner_up: the second plan is validated too if it costs at most this many times the best.
        estimate_spread: standard deviation of an estimate's error, in logarithms.
        disagreement: two times of a kernel that differ by a larger factor contradict each other.

        block_measurements: `assembly.blocks`: candidates of a block measured before its first
            interface has a plan.
        interface_measurements: more candidates measured for each further interface.
        refine_measurements: more candidates when an interface is refined; twice as many for a
            repeated block.
        block_seconds: the first search of one interface of a block.
        refine_seconds: the refinement of one interface; twice as long for a repeated block.
        baseline_seconds: the solve for one baseline of a block.
        whole_baseline_seconds: the solve for one baseline of a model that is one block.
        block_groups: groups of a block; one with more is enumerated with smaller groups.
        fewest_primitives: the smallest size of groups that this leads to.
        choices: times that segments choose their interfaces.
        change_rounds: `assembly.assemble`: times that the changes of layout in a choice are
            measured.
        prefer_seconds: the choice of interfaces by estimates.
        prefer_gap: gap at which that choice ends.
        explore_rounds: `assembly.explore`: rounds.
        explore_first_candidates: candidates measured in the first round beside those of the plan.
        explore_candidates: the same in later rounds.
        explore_block_share: largest share of these from one block.
        explore_near: from the third round on, an interface whose estimate is more than this many
            times that of the block's best is not estimated again.
        explore_batch_seconds: least time for which a round is begun.
        explore_solve_seconds: the solve of one interface by estimates.
        explore_gap: gap at which it ends.
        explore_ahead: candidates that are compiled while the next round is chosen.
        explore_interfaces: with more, exploration is skipped: the programs need too much memory.
        explore_quiet: a round that gains a smaller share is the last.

        extract_seconds: `explanation.extract`: the choice of one alternative per value.
        savings_seconds: `explanation.savings`: the solve without one rule.
        savings_gap: gap at which it ends.
        groupings: `explanation.counterfactual`: other groupings reported per kernel.
        grouping_seconds: the solve for one of them.
        groupings_seconds: all of them.

        concurrent_kernel_ns: `concurrent`: longer kernels are not run side by side.
        concurrent_variants: other variants of a kernel that are measured on a part of the threads.
        concurrent_start_ns: what a set is estimated to take beyond its longest lane.
        concurrent_gain_ns: least estimated gain of a set.
        concurrent_pairs: pairs proposed per kernel.
        concurrent_filled: sets proposed per kernel that fill the other threads.
        concurrent_rounds: choices whose sets are measured.
        concurrent_solve_seconds: one choice.
        concurrent_solve_share: share of the time left for one choice.
        concurrent_last_seconds: one choice, where no time is left.
        concurrent_gap: gap at which a choice ends.

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
    side_by_side_share: float = 0.1
    side_by_side_seconds: float = 60.0
    least_side_by_side_seconds: float = 2.0
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

    concurrent_kernel_ns: int = 500_000
    concurrent_variants: int = 3
    concurrent_start_ns: int = 500
    concurrent_gain_ns: int = 200
    concurrent_pairs: int = 6
    concurrent_filled: int = 1
    concurrent_rounds: int = 5
    concurrent_solve_seconds: float = 8.0
    concurrent_solve_share: float = 0.2
    concurrent_last_seconds: float = 1.0
    concurrent_gap: float = 0.01

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)

    def segment_limit(self, primitives: int) -> int | None:
        """Return the most primitives in a segment of a model of this size; None if it is not cut."""
        if self.partition == "auto":
            return self.segment_primitives if primitives > self.whole_primitives else None
        return None if self.partition == "off" else int(self.partition)


DEFAULT_LIMITS = SearchLimits()
