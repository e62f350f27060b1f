"""The plan of a model for one size -> its plan for another size: the same kernels, generated for other extents.

Both graphs have the same primitives and alternatives, so each kernel of the plan has a counterpart: the same primitives
in the same layouts, from the same provider. Nothing is enumerated or solved.
"""

import time

from korch.binary_program.problem import Certificate
from korch.candidate.candidate import Candidate, Group, Refusal, make_group, make_layout_change
from korch.errors import InfeasibleError
from korch.measure.meter import AnyMeter
from korch.pipeline.run import Run, Template
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.counterpart import Counterparts, counterparts
from korch.search.instance import Answers
from korch.search.ledger import Ledger
from korch.search.result import Orchestration, PlanName, Round
from korch.segments.search import Outcome


def transferred(run: Run, graph: PrimitiveGraph, ledger: Ledger, template: Template) -> Outcome:
    """Return a plan for a run's size that consists of the kernels of another size's plan.

    Raises:
        InfeasibleError: a kernel has no counterpart at this size.
    """
    begun_s, meter = time.monotonic(), ledger.meter
    answers = Answers(meter.providers, meter.target, meter.faults)
    same = counterparts(template.graph, graph)
    options = [_options(step, graph, same, answers, meter) for step in template.steps]
    rivals = [c for own in options if len(own) > 1 for c in own]
    if run.options.measure:
        ledger.measure(rivals, run.build_deadline)
    steps = tuple(_least(own, ledger) for own in options)
    costs = [ledger.cost_ns(step) for step in steps]
    total_ns = sum(cost for cost, _ in costs)
    spent_s = time.monotonic() - begun_s
    flags = [is_known for _, is_known in costs]
    certificate = Certificate.of(total_ns, sum(map(meter.bound_ns, steps)), flags, range(len(flags)), spent_s)
    found = Orchestration(
        steps=steps,
        certificate=certificate,
        costs_ns=tuple(cost for cost, _ in costs),
        rounds=(Round(certificate.bound_ns, total_ns, sum(flags), spent_s),),
        distinct_measured=ledger.timed_kernels,
        failed=sum(map(ledger.has_failed, rivals)),
        stopped_by_budget=False,
    )
    return Outcome({PlanName.SEARCHED: steps}, found)


def _options(
    step: Candidate, graph: PrimitiveGraph, same: Counterparts, answers: Answers, meter: AnyMeter
) -> list[Candidate]:
    """Return the possible counterparts of a kernel of another size: the same kernel, or else others in its layouts.

    Kernels that can't be generated for the extents of this size are left out.
    """
    group = _group(step.group, graph, same)
    given = {(same.values[value], layout) for value, layout in step.input_ports}
    written = {(same.values[value], layout) for value, layout in step.output_ports}
    offered = (
        Candidate(group, provider.name, offer, provider.version)
        for provider, answer in answers.to(group)
        for offer in (() if isinstance(answer, Refusal) else answer)
    )
    found = [c for c in offered if given == set(c.input_ports) and written == set(c.output_ports)]
    own = [c for c in found if (c.provider, c.offer.variant) == (step.provider, step.offer.variant)]
    for options in (own, found):
        able = [c for c in options if not isinstance(meter.kernel(c), Refusal)]
        if able:
            return able
    raise InfeasibleError(f"a kernel of {step.provider} has no counterpart at another size")


def _group(group: Group, graph: PrimitiveGraph, same: Counterparts) -> Group:
    try:
        outputs = [same.values[value] for value in group.outputs]
        if group.is_layout_change:
            return make_layout_change(graph, outputs[0])
        return make_group(graph, [same.primitives[p] for p in group.primitives], outputs)
    except KeyError as error:
        raise InfeasibleError("a part of the model is computed in another way at another size") from error


def _least(options: list[Candidate], ledger: Ledger) -> Candidate:
    """Return the kernel that takes the least time, of those that run."""
    able = [c for c in options if not ledger.has_failed(c)]
    if not able:
        raise InfeasibleError(f"a kernel of {options[0].provider} does not run at another size")
    return min(able, key=lambda c: (not ledger.cost_ns(c)[1], ledger.cost_ns(c)[0]))
