"""Checks of instances and plans that need no solver.

`verify_plan` runs on every plan before it is returned, so that an error in the solver, in a row or in a
bound can't lead to a wrong executable. Each rule is a separate function. All checks are linear in the
size of the input, with two exceptions: the running order uses a heap of ready kernels, and the check for
cycles inside a kernel passes over the kernel's primitives until none is left.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from korch.binary_program.problem import Plan, Port, Problem, Status
from korch.errors import InvalidGraphError


def check_problem(problem: Problem) -> None:
    """Check an instance.

    Raises:
        InvalidGraphError: a kernel breaks one of the rules below.
    """
    checked = set()
    for k, kernel in enumerate(problem.kernels):
        _kernel_is_sound(problem, k)
        read, written = ({port.value for port in ports} for ports in (kernel.inputs, kernel.outputs))
        values = kernel.steps, frozenset(read), frozenset(written)
        if values in checked:  # the rest does not depend on layouts
            continue
        checked.add(values)
        _kernel_reads_what_it_lacks(problem, k)
        _kernel_writes_what_it_has(problem, k)
        _kernel_has_no_cycle(problem, k)


def _kernel_is_sound(problem: Problem, k: int) -> None:
    """Check that a kernel writes something once, runs existing primitives, owns only what it reads, and costs >= 0."""
    kernel = problem.kernels[k]
    if not kernel.outputs or len(set(kernel.outputs)) < len(kernel.outputs):
        raise _fault("it writes no port, or one twice", k)
    if not all(0 <= p < len(problem.steps) for p in kernel.steps):
        raise _fault("it runs a primitive that does not exist", k)
    if not {port.value for port in kernel.owns} <= {port.value for port in kernel.inputs}:
        raise _fault("it owns a port of a value that it does not read", k)
    if kernel.cost_ns < 0:
        raise _fault(f"its cost is {kernel.cost_ns} ns", k)


def _kernel_reads_what_it_lacks(problem: Problem, k: int) -> None:
    """Check that a kernel computes or reads each input of its primitives."""
    kernel = problem.kernels[k]
    there = {port.value for port in kernel.inputs} | problem.given_values
    there |= {problem.steps[p].output for p in kernel.steps}
    for p in sorted(kernel.steps):
        for value in problem.steps[p].inputs:
            if value not in there:
                raise _fault(f"primitive p{p} needs %{value}, which it neither has nor reads", k)


def _kernel_writes_what_it_has(problem: Problem, k: int) -> None:
    """Check that a kernel computes or reads each value that it writes."""
    kernel = problem.kernels[k]
    there = {port.value for port in kernel.inputs} | problem.constants
    there |= {problem.steps[p].output for p in kernel.steps}
    for port in kernel.outputs:
        if port.value not in there:
            raise _fault(f"it writes {port}, which it neither computes nor reads", k)


def _kernel_has_no_cycle(problem: Problem, k: int) -> None:
    """Check that a kernel's primitives don't wait for each other."""
    waiting = [problem.steps[p] for p in problem.kernels[k].steps]
    there = {port.value for port in problem.kernels[k].inputs} | problem.given_values
    while waiting:
        later = [step for step in waiting if not there.issuperset(step.inputs)]
        if len(later) == len(waiting):
            raise _fault("its primitives wait for each other", k)
        there.update(step.output for step in waiting if there.issuperset(step.inputs))
        waiting = later


def verify_plan(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Check a plan; its kernels may be in any order.

    `plan`: a plan with kernels; one whose status is INFEASIBLE or UNKNOWN must have none.

    Returns:
        The plan's kernels in an order in which they can run: the given one if it can.

    Raises:
        InvalidGraphError: the plan breaks one of the rules below.
    """
    if plan.certificate.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if plan.kernels:
            raise InvalidGraphError(f"a plan that is {plan.certificate.status.value} has kernels")
        return ()
    order = verify_kernels(problem, plan.kernels)
    _costs_add_up(problem, plan)
    return order


def verify_kernels(problem: Problem, kernels: Sequence[int]) -> tuple[int, ...]:
    """Check that kernels form a plan; their costs are not checked.

    Returns:
        The kernels in an order in which they can run: the given one if it can.

    Raises:
        InvalidGraphError: they break one of the rules below.
    """
    _kernels_exist(problem, kernels)
    _differ("writes", [(k, problem.kernels[k].outputs) for k in kernels])
    _differ("owns", [(k, problem.kernels[k].owns) for k in kernels])
    _outputs_are_written(problem, kernels)
    _inputs_are_written(problem, kernels)
    _errors_add_up(problem, kernels)
    if repeated := problem.repeated(kernels):
        raise InvalidGraphError(f"several kernels run the primitive p{min(repeated)}, which may run only once")
    return _running_order(problem, kernels)


def _kernels_exist(problem: Problem, kernels: Sequence[int]) -> None:
    """Check that the chosen kernels exist, each chosen once."""
    if len(set(kernels)) < len(kernels):
        raise InvalidGraphError("the plan has a kernel twice")
    for k in kernels:
        if not 0 <= k < len(problem.kernels):
            raise _fault(f"there are only {len(problem.kernels)} kernels", k)


def _differ(verb: str, ports_of: Sequence[tuple[int, Sequence[Port]]]) -> None:
    """Check that no port is written, or owned, by two kernels."""
    first: dict[Port, int] = {}
    for k, ports in ports_of:
        for port in ports:
            if port in first:
                raise _fault(f"it {verb} {port}, as kernel k{first[port]} does", k)
            first[port] = k


def _outputs_are_written(problem: Problem, kernels: Sequence[int]) -> None:
    """Check that the required ports are written or given."""
    written = {port for k in kernels for port in problem.kernels[k].outputs}
    for port in problem.required:
        if port not in written and not problem.is_given(port):
            raise InvalidGraphError("no chosen kernel writes a model output", where=str(port))


def _inputs_are_written(problem: Problem, kernels: Sequence[int]) -> None:
    """Check that each chosen kernel's inputs are written or given."""
    written = {port for k in kernels for port in problem.kernels[k].outputs}
    for k in kernels:
        for port in problem.needs(k):
            if port not in written:
                raise _fault(f"it reads {port}, which no chosen kernel writes", k)


def _errors_add_up(problem: Problem, kernels: Sequence[int]) -> None:
    """Check that the errors of the chosen kernels are within the budget."""
    total = sum(problem.kernels[k].error for k in kernels)
    if total > problem.most_error:
        raise InvalidGraphError(f"the errors of the plan's kernels add up to {total}, more than {problem.most_error}")


def _costs_add_up(problem: Problem, plan: Plan) -> None:
    """Check that the objective is the sum of the costs, and that all costs are measured if the certificate says so."""
    total_ns = sum(problem.kernels[k].cost_ns for k in plan.kernels)
    if total_ns != plan.certificate.objective_ns:
        raise InvalidGraphError(
            f"the plan's kernels cost {total_ns} ns, but its certificate says {plan.certificate.objective_ns} ns"
        )
    if plan.certificate.is_measured:
        for k in plan.kernels:
            if not problem.kernels[k].is_measured:
                raise _fault("its cost is a bound, but the certificate says measured", k)


def _running_order(problem: Problem, kernels: Sequence[int]) -> tuple[int, ...]:
    """Return kernels in an order in which they can run, kept as close to the given order as possible."""
    order, waiting = ready_order(problem, kernels)
    if waiting:
        names = ", ".join(f"k{k}" for k in waiting[:8])
        raise InvalidGraphError(f"the chosen kernels {names} wait for each other")
    return order


def ready_order(problem: Problem, kernels: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the kernels that can run, in order, and those that wait for each other.

    The order is the one that repeated passes over `kernels` would give, where each pass takes the
    kernels that are ready. It is computed with a heap instead of passes, in O(n log n).
    """
    missing = [len(problem.needs(k)) for k in kernels]
    readers: dict[Port, list[int]] = {}
    for n, k in enumerate(kernels):
        for port in problem.needs(k):
            readers.setdefault(port, []).append(n)
    ready = [(0, n) for n, count in enumerate(missing) if not count]  # (pass, position)
    written: set[Port] = set()
    order: list[int] = []
    while ready:
        turn, n = heappop(ready)
        order.append(kernels[n])
        for port in problem.kernels[kernels[n]].outputs:
            for reader in readers.get(port, ()) if port not in written else ():
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, (turn if reader > n else turn + 1, reader))
            written.add(port)
    return tuple(order), tuple(k for k, count in zip(kernels, missing, strict=True) if count)


def _fault(what: str, k: int) -> InvalidGraphError:
    return InvalidGraphError(what, where=f"kernel k{k}")
