"""The text form of an instance and of a plan: deterministic and parseable, with one item per line.

    given %0:abcd
    constant %1
    p0: %2 = %0 %1
    p1: %3 = %2
    require %3:abcd
    k0: p0 p1 | %0:abcd -> %3:abcd | 1200 bound
    k1:  | %2:abcd -> %2:acdb | 300 measured
    k2: p2 | %4:abcd %5:abcd -> %6:abcd | 0 measured owns %4:abcd %5:abcd
    k3: p2 | %4:abcd %5:abcd -> %6:abcd | 90 measured error 7
    most error 9
    once p0 p1

    plan optimal objective=1200 bound=1200 kernels=2 measured=1 bound-costs
    k0

The first paragraph is an instance, with its lines in this order; the second is a plan. Of several instances,
each follows a line `block 0`, `block 1`, and so on. A comment runs from `#` to the end of the line.
"""

import re
from collections.abc import Iterator, Sequence

from korch.binary_program.problem import Computation, Plan, Port, PricedKernel, Problem
from korch.errors import InvalidGraphError

_STEP = re.compile(r"p(\d+): %(\d+) =((?: %\d+)*)$")
_KERNEL = re.compile(r"k(\d+): ([p\d ]*) \| ?(.*?) ?-> (.*) \| (\d+) (bound|measured)(?: error (\d+))?(?: owns (.*))?$")
_PORT = re.compile(r"%(\d+):(\S+)$")


def format_problem(problem: Problem) -> str:
    """Return the text form of an instance."""
    lines = [f"given {port}" for port in sorted(problem.given)]
    lines += [f"constant %{value}" for value in sorted(problem.constants)]
    for p, step in enumerate(problem.steps):
        lines.append(f"p{p}: %{step.output} =" + "".join(f" %{v}" for v in step.inputs))
    lines += [f"require {port}" for port in problem.required]
    for k, kernel in enumerate(problem.kernels):
        steps = " ".join(f"p{p}" for p in sorted(kernel.steps))
        inputs = " ".join(map(str, kernel.inputs))
        outputs = " ".join(map(str, kernel.outputs))
        kind = "measured" if kernel.is_measured else "bound"
        owns = f" owns {' '.join(map(str, kernel.owns))}" if kernel.owns else ""
        error = f" error {kernel.error}" if kernel.error else ""
        lines.append(f"k{k}: {steps} | {inputs} -> {outputs} | {kernel.cost_ns} {kind}{error}{owns}")
    if problem.most_error:
        lines.append(f"most error {problem.most_error}")
    if problem.once:
        lines.append("once " + " ".join(f"p{p}" for p in sorted(problem.once)))
    return "\n".join(lines) + "\n"


def format_problems(problems: Sequence[Problem]) -> str:
    """Return the text form of the instances of a model's blocks; a single instance has no `block` line."""
    texts = [format_problem(problem) for problem in problems]
    return texts[0] if len(texts) == 1 else "".join(f"block {b}\n{text}" for b, text in enumerate(texts))


def parse_problems(text: str) -> tuple[Problem, ...]:
    """Return the instances that print as `text`; a plan that follows them is skipped.

    Raises:
        InvalidGraphError: a line can't be read.
    """
    instances = re.split(r"^plan ", text, maxsplit=1, flags=re.MULTILINE)[0]
    first, *others = re.split(r"^block \d+$", instances, flags=re.MULTILINE)
    return tuple(map(parse_problem, others or (first,)))


def parse_problem(text: str) -> Problem:
    """Return the instance that prints as `text`.

    Raises:
        InvalidGraphError: a line can't be read.
    """
    given: set[Port] = set()
    constants: set[int] = set()
    required: list[Port] = []
    steps: list[Computation] = []
    kernels: list[PricedKernel] = []
    most_error, once = 0, frozenset[int]()
    for number, line in _lines(text):
        word, _, rest = line.partition(" ")
        if word == "given":
            given.add(_port(rest, number))
        elif word == "require":
            required.append(_port(rest, number))
        elif re.fullmatch(r"constant %\d+", line):
            constants.add(int(rest[1:]))
        elif re.fullmatch(r"most error \d+", line):
            most_error = int(rest.removeprefix("error "))
        elif re.fullmatch(r"once( p\d+)+", line):
            once = frozenset(int(p[1:]) for p in rest.split())
        elif (match := _STEP.match(line)) and int(match[1]) == len(steps):
            steps.append(Computation(int(match[2]), tuple(int(v[1:]) for v in match[3].split())))
        elif (match := _KERNEL.match(line)) and int(match[1]) == len(kernels):
            kernels.append(
                PricedKernel(
                    steps=frozenset(int(p[1:]) for p in match[2].split()),
                    inputs=tuple(_port(port, number) for port in match[3].split()),
                    outputs=tuple(_port(port, number) for port in match[4].split()),
                    cost_ns=int(match[5]),
                    is_measured=match[6] == "measured",
                    owns=tuple(_port(port, number) for port in (match[8] or "").split()),
                    error=int(match[7] or 0),
                )
            )
        else:
            raise _unreadable(line, number)
    if not required:
        raise InvalidGraphError("the text has no line 'require PORT'")
    ports = tuple(required), frozenset(given)
    return Problem(tuple(steps), tuple(kernels), *ports, frozenset(constants), most_error, once)


def format_plan(plan: Plan, names: Sequence[str] | None = None) -> str:
    """Return the text form of a plan, without the duration of the search.

    `names`: the names of the kernels; k0, k1, and so on if not given.
    """
    c = plan.certificate
    objective = "none" if c.objective_ns is None else c.objective_ns
    kind = "measured" if c.is_measured else "bound"
    head = (
        f"plan {c.status.value} objective={objective} bound={c.bound_ns} kernels={c.kernels} "
        f"measured={c.measured} {kind}-costs"
    )
    return "\n".join([head, *(names[k] if names else f"k{k}" for k in plan.kernels)]) + "\n"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def _port(text: str, number: int) -> Port:
    match = _PORT.match(text)
    if match is None:
        raise _unreadable(text, number)
    return Port(int(match[1]), match[2])


def _unreadable(text: str, number: int) -> InvalidGraphError:
    return InvalidGraphError(f"can't read {text!r}", where=f"line {number}")
