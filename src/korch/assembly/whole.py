"""A model that is one block with one interface -> its plans."""

from __future__ import annotations

from collections.abc import Callable

from korch.assembly.task import Task
from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.explanation.baselines import baseline_plans
from korch.options import Options
from korch.search.ledger import Ledger
from korch.search.loop import Search
from korch.search.measure import confirm
from korch.search.recall import Solved, keep_solved, recall_solved
from korch.search.result import PlanName, Round


def search_whole(
    task: Task, ledger: Ledger, options: Options, deadline: Deadline, on_round: Callable[[Round], None]
) -> Solved:
    """Search a model that is one segment; what was searched before is recalled."""
    tag = "" if options.ablation.baselines else "alone"
    kept = recall_solved(ledger, task.candidates, options, tag) if options.measure else None
    if kept is not None:
        return kept
    graph, limits = task.block.graph, ledger.limits
    search = Search(graph, task.candidates, ledger, options, deadline.less(limits.confirm_share), on_round)
    found = search.run()
    for _ in range(limits.confirmations if options.measure else 0):
        if not confirm(ledger, found.steps, deadline):
            break
        search.revise(found)
        found = search.prove()
    plans: dict[str, tuple[Candidate, ...]] = {PlanName.OPTIMAL: found.steps}
    if not options.measure:
        return Solved(found, plans)
    if options.ablation.baselines and not ledger.is_over(deadline):
        plans |= baseline_plans(graph, search.usable, ledger, options, limits.whole_baseline_seconds)
    if second := search.runner_up():
        plans["second"] = second
    solved = Solved(found, plans)
    keep_solved(ledger, task.candidates, options, solved, tag)
    return solved
