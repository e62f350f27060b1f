"""Instance -> binary linear program.

Variables, all integers:

    use[k]       0 or 1   kernel k is chosen
    written[q]   0 or 1   a chosen kernel writes port q (a value in a layout, such as %7:abcd)
    extract[p]   0 or 1   some chosen kernel runs primitive p
    again[p]     ≥ 0      how often p is run after the first time (recomputation)
    computed[v]  0 or 1   value v is computed; extract[p] if p is its only alternative
    first[p]     0 or 1   p is the first to compute its value; extract[p] if it is the only one

Minimise Σ cost[k] · use[k]. Each function adds one family of rows. Its docstring gives the inequality,
what it forbids, a proof that every plan satisfies it, and whether it is needed or only tightens the
relaxation. The needed families are `add_outputs`, `add_single_producer`, `add_single_owner`,
`add_dependencies` and `add_errors`. They do not forbid a cycle of kernels that wait for each other; if a
solution has one, the solver adds `loop_row`s. All other families tighten the relaxation. With them the
solver needs seconds, without them it does not finish: with the needed rows alone, fractions of many kernels
share one producer in the relaxation.

A plan is what `problem` defines: its chosen kernels can be ordered so that every port is written before
it is read. The proofs below use only this property. None assumes that a primitive runs once, or that a
value has one alternative or one layout.

Source: the rows for outputs and dependencies are from Korch (ASPLOS 2024), section 4.2. The covering
rows are disjunctive action landmarks of delete-free planning (Bonet and Helmert, ECAI 2010). The loop
rows are loop formulas of logic programs (Lin and Zhao, 2004).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

from korch.binary_program.problem import Port, Problem
from korch.primitive.bitset import bits
from korch.primitive.component import strong_components


@dataclass(frozen=True, slots=True)
class LinearRow:
    """Σ coefficient · variable ≥ least, or = least.

    Attributes:
        columns: variable numbers, no two equal.
        coefficients: one per column.
        least: the right-hand side.
        is_equal: whether it holds with equality.
    """

    columns: tuple[int, ...]
    coefficients: tuple[int, ...]
    least: int
    is_equal: bool = False


@dataclass
class Formulation:
    """A program that grows row by row.

    Attributes:
        problem: the instance.
        most: the upper bound of each variable; the lower one is 0.
        rows: the rows.
    """

    problem: Problem
    most: list[int] = field(default_factory=list)
    rows: list[LinearRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.problem
        for _ in problem.kernels:
            self.variable(1)
        self.ports = {port: self.variable(1) for port in problem.producers}
        self.runners: list[list[int]] = [[] for _ in problem.steps]
        for k, kernel in enumerate(problem.kernels):
            for p in kernel.steps:
                self.runners[p].append(k)
        self.extracts = [self.variable(1) for _ in problem.steps]
        self.agains = [
            self.variable(0 if p in problem.once else max(0, len(runners) - 1))
            for p, runners in enumerate(self.runners)
        ]
        self.firsts = list(self.extracts)
        self.computed: dict[int, int] = {}
        for value, makers in problem.alternatives.items():
            if len(makers) == 1:
                self.computed[value] = self.extracts[makers[0]]
                continue
            self.computed[value] = self.variable(1)
            for p in makers:
                self.firsts[p] = self.variable(1)
        self.layouts: dict[int, list[Port]] = {}
        for port in problem.producers:
            self.layouts.setdefault(port.value, []).append(port)
        self.needs = [problem.needs(k) for k in range(len(problem.kernels))]
        self._readers: dict[Port, list[int]] = {}
        for k, ports in enumerate(self.needs):
            for port in ports:
                self._readers.setdefault(port, []).append(k)
        self._readers_of: dict[frozenset[Port], frozenset[int]] = {}
        self._entries: dict[frozenset[Port], tuple[int, ...]] = {}

    def readers(self, ports: frozenset[Port]) -> frozenset[int]:
        """Return the kernels that need a port of a set."""
        if ports not in self._readers_of:
            found = (self._readers.get(port, ()) for port in ports)
            self._readers_of[ports] = frozenset(chain.from_iterable(found))
        return self._readers_of[ports]

    def entries(self, ports: frozenset[Port]) -> tuple[int, ...]:
        """Return the kernels that enter a set of ports: they write a port of the set and read none of it."""
        if ports not in self._entries:
            writers = {k for port in ports for k in self.problem.producers.get(port, ())}
            self._entries[ports] = tuple(sorted(writers - self.readers(ports)))
        return self._entries[ports]

    def variable(self, most: int) -> int:
        """Add a variable and return its number."""
        self.most.append(most)
        return len(self.most) - 1

    def at_least(
        self, plus: Iterable[int], minus: Iterable[int] = (), least: int = 0, is_equal: bool = False
    ) -> LinearRow:
        """Add Σ plus - Σ minus ≥ least (or = least); a variable in both cancels out."""
        terms = dict.fromkeys(plus, 1)
        for column in minus:
            terms[column] = terms.get(column, 0) - 1
        kept = {column: c for column, c in terms.items() if c}
        row = LinearRow(tuple(kept), tuple(kept.values()), least, is_equal)
        self.rows.append(row)
        return row


def formulate(problem: Problem) -> Formulation:
    """Return the program of an instance with all families of rows."""
    program = Formulation(problem)
    add_outputs(program)
    add_single_producer(program)
    add_single_owner(program)
    add_dependencies(program)
    add_errors(program)
    add_covering(program)
    add_shared_dependencies(program)
    add_extraction(program)
    add_landmarks(program)
    add_shared_landmarks(program)
    add_entries(program)
    return program


def add_outputs(program: Formulation) -> None:
    """Make a plan write the model's outputs.

    written[q] = 1 for each required port q that is not given. Forbids the empty plan. Needed.

    Source: Korch, section 4.2, output constraints.
    """
    for port in dict.fromkeys(program.problem.required):
        if not program.problem.is_given(port):
            columns = (program.ports[port],) if port in program.ports else ()
            program.at_least(columns, least=1, is_equal=True)


def add_single_producer(program: Formulation) -> None:
    """Let at most one chosen kernel write a port.

    Σ_{k writes q} use[k] = written[q] ≤ 1. Forbids that two kernels write one buffer. Needed: it
    also defines written[q]. There is a candidate for each useful set of outputs, so no good plan is
    lost.
    """
    for port, kernels in program.problem.producers.items():
        program.at_least(kernels, (program.ports[port],), is_equal=True)


def add_single_owner(program: Formulation) -> None:
    """Let the memory of a port be a part of at most one other port's memory.

    Σ_{k owns q} use[k] ≤ 1 for each port q. Forbids that a value is a part of two in-place
    concatenations, since it has only one address. Needed.
    """
    for kernels in program.problem.owners.values():
        if len(kernels) > 1:
            program.at_least((), kernels, least=-1)


def add_dependencies(program: Formulation) -> None:
    """Make a plan write what its kernels read.

    Σ_{k reads q and writes r} use[k] ≤ written[q] for each pair of ports q, r with such kernels.
    Forbids choosing a kernel whose input is not written. Needed. Stronger than Korch's
    use[k] ≤ written[q], with fewer rows.

    Proof: at most one chosen kernel writes r, so the sum is 0 or 1; if it is 1, then that kernel
    reads q, which a chosen kernel must have written. Every kernel writes some r, so each
    dependency is in a row.

    Source: Korch, section 4.2, dependency constraints.
    """
    readers: dict[tuple[Port, Port], list[int]] = {}
    for k, kernel in enumerate(program.problem.kernels):
        for port in program.needs[k]:
            for written in dict.fromkeys(kernel.outputs):
                readers.setdefault((port, written), []).append(k)
    for (port, _), kernels in readers.items():
        program.at_least(_column(program, port), kernels)


def add_errors(program: Formulation) -> None:
    """Bound the error that kernels of less precise types add to the results.

    Σ error[k] · use[k] ≤ most_error. Forbids plans whose errors exceed the budget. Needed, if there are such kernels.

    Proof: it is the definition of the budget. A primitive that two chosen kernels run counts twice, although its
    error is the same both times. So the row may forbid a plan with recomputation that is within the budget, but it
    never admits a plan that exceeds it.
    """
    errors = {k: -kernel.error for k, kernel in enumerate(program.problem.kernels) if kernel.error}
    if errors:
        row = LinearRow(tuple(errors), tuple(errors.values()), -program.problem.most_error)
        program.rows.append(row)


def add_covering(program: Formulation) -> None:
    """Define which primitives are run, and how often.

    Σ_{k runs p} use[k] = extract[p] + again[p], and, if the output of p has alternatives,
    Σ_{k runs p and writes r} use[k] ≤ extract[p] for each port r. Forbids extracting a primitive
    that no chosen kernel runs, and choosing a kernel without extracting its primitives. If
    `add_extraction` forces extract[p] = 1, the first row is the covering row that makes the
    relaxation tight: every primitive that a plan must run is in a chosen kernel. Tightens. If p may run only once,
    again[p] is 0.

    Proof: a definition; extract[p] = min(1, the first sum), again[p] = the rest. The second sum is
    at most 1, since at most one chosen kernel writes r.
    """
    problem = program.problem
    for p, kernels in enumerate(program.runners):
        program.at_least(kernels, (program.extracts[p], program.agains[p]), is_equal=True)
        if len(problem.alternatives[problem.steps[p].output]) == 1:
            continue
        writers: dict[Port, list[int]] = {}
        for k in kernels:
            for port in dict.fromkeys(problem.kernels[k].outputs):
                writers.setdefault(port, []).append(k)
        for same in writers.values():
            program.at_least((program.extracts[p],), same)


def add_extraction(program: Formulation) -> None:
    """Extract an alternative of every value that is needed.

    With computed[v] = Σ_{p computes v} first[p] ≤ 1 and first[p] ≤ extract[p]:
    extract[p] ≤ computed[v] for each input v of p, and 1 ≤ computed[v] for each required v, v not
    given. Tightens.

    Proof, with alternatives, layouts and recomputation: let first[p] = 1 if p is the first in the
    plan to compute its output. Let a chosen kernel k run p. The input v of p is computed by
    another primitive of k, or k reads v in some layout L (`check_problem` demands one of the
    two). In the second case an earlier chosen kernel wrote v in L. That kernel runs a primitive that
    computes v, or it only changes the layout of v and thus reads v itself. Each such step goes back in
    the plan's order, and v is not given, so the steps end at a kernel that runs a primitive that
    computes v. The same argument applies to a required port.

    A row extract[p] + extract[p'] ≤ 1 for p and p' that undo each other would be *false*: one
    kernel may compute b and from it write only a, and another recompute b from a.
    """
    problem = program.problem
    for value, makers in problem.alternatives.items():
        if len(makers) > 1:
            firsts = [program.firsts[p] for p in makers]
            program.at_least(firsts, (program.computed[value],), is_equal=True)
            for p in makers:
                program.at_least((program.extracts[p],), (program.firsts[p],))
    for p, step in enumerate(problem.steps):
        for value in dict.fromkeys(step.inputs):
            if value not in problem.given_values:
                computed = (program.computed[value],) if value in program.computed else ()
                program.at_least(computed, (program.extracts[p],))
    for value in dict.fromkeys(port.value for port in problem.required):
        if value not in problem.given_values and value in program.computed:
            program.at_least((program.computed[value],), least=1)


def add_landmarks(program: Formulation) -> None:
    """Let alternatives that all need a value share it.

    Σ_{p computes v, p must u} first[p] ≤ computed[u] for values u and v, where *p must u* means
    that no plan runs p without computing u before. Without these rows the relaxation may take half
    of one alternative, half of another, and only half of the value that both need, which halves the
    bound. Tightens.

    Proof: at most one p is the first to compute v. If p must u, then u is computed in that plan.
    """
    for _, same, other in _shared_landmarks(program.problem):
        firsts = [program.firsts[p] for p in same]
        program.at_least((program.computed[other],), firsts)


def add_shared_landmarks(program: Formulation) -> None:
    """Let kernels that run alternatives of a value share their dependency on a landmark.

    computed[v] ≤ Σ_{k enters Q} use[k] + Σ_{k computes v, reads none of Q} use[k] for each value v
    and landmark u as in `add_landmarks`, and set Q of non-given layouts of u. Does for layouts and
    alternatives together what `add_shared_dependencies` does for one primitive. Tightens.

    Proof: if v is computed then some chosen kernel computes it. If that kernel reads no port of Q, the
    second sum is at least 1. Otherwise a port of Q is written, and the first port of Q to be written is
    written by a kernel that enters Q.
    """
    problem = program.problem
    for value, _, other in _shared_landmarks(problem):
        runners = {k for p in problem.alternatives[value] for k in program.runners[p]}
        for ports in _port_sets(program, other):
            kernels = runners - program.readers(ports)
            kernels.update(program.entries(ports))
            program.at_least(sorted(kernels), (program.computed[value],))


def _shared_landmarks(problem: Problem) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield (v, alternatives, u): two or more alternatives of v need u, and no other such value needs u."""
    needed = landmarks(problem)
    for value, makers in problem.alternatives.items():
        if len(makers) < 2 or value in problem.given_values:
            continue
        needed_by = [_union(needed, problem.steps[p].inputs) for p in makers]
        groups: dict[tuple[int, ...], list[int]] = {}
        for other in bits(_shared(needed_by)):
            same = tuple(p for p, mask in zip(makers, needed_by, strict=True) if mask >> other & 1)
            groups.setdefault(same, []).append(other)
        for same, others in groups.items():
            farther = 0
            for other in others:
                farther |= needed[other] & ~(1 << other)
            for other in others:
                if not farther >> other & 1 and other != value:
                    yield value, same, other


def landmarks(problem: Problem) -> dict[int, int]:
    """Return for each computable, non-given value the values that must be computed for it.

    The largest solution of L(v) = {v} ∪ ∩_{p computes v} ∪_{u read by p} L(u), as bit masks.

    Source: Keyder, Richter and Helmert, "Sound and complete landmarks for AND/OR graphs" (2010).
    """
    values = [v for v in problem.alternatives if v not in problem.given_values]
    everything = sum(1 << v for v in values)
    needed = dict.fromkeys(values, everything)
    changed = True
    while changed:
        changed = False
        for value in values:
            mask = everything
            for p in problem.alternatives[value]:
                mask &= _union(needed, problem.steps[p].inputs)
            mask |= 1 << value
            changed |= mask != needed[value]
            needed[value] = mask
    return needed


def add_shared_dependencies(program: Formulation) -> None:
    """Let kernels that share a primitive share their dependency.

    Σ_{k runs p and reads a port in Q} use[k] ≤ Σ_{k enters Q} use[k] + again[p], for each
    primitive p, input v of p and set Q of non-given layouts of v, where k *enters* Q if it writes
    a port of Q and reads none. Forbids that half of a kernel in one layout and half of a kernel in
    another layout need only half of a producer each. Tightens the relaxation much, since it makes it
    pay for the change of layout.

    Proof: let n chosen kernels run p. If none of them reads a port of Q, the left side is 0. Otherwise
    some port of Q is written. The first such port is written by a kernel that reads none of Q, so the
    sum on the right is at least 1. As again[p] = n - 1, the right side is at least n.
    """
    problem = program.problem
    for p, step in enumerate(problem.steps):
        for value in dict.fromkeys(step.inputs):
            if value in problem.constants:
                continue
            for ports in _port_sets(program, value):
                reading = program.readers(ports)
                readers = [k for k in program.runners[p] if k in reading]
                if readers:
                    columns = (*program.entries(ports), program.agains[p])
                    program.at_least(columns, readers)


def add_entries(program: Formulation) -> None:
    """Forbid cycles: a cycle of ports or values must be entered from outside.

    written[q] ≤ Σ_{k enters Q} use[k] for each set Q of two or more non-given layouts of a value
    and q in Q; and computed[v] ≤ Σ first[p] over the p that compute a value of C and read none,
    for each strongly connected set C of values and v in C. Forbids fractional cycles of layout
    changes, and of alternatives that undo each other. Tightens.

    Proof: the first row is `loop_row`. For the second, consider the first time that the plan
    computes a value of C (kernels in order, within a kernel in the order of its primitives): the
    primitive that does it reads no value of C, since none exists yet.
    """
    for value in program.layouts:
        for ports in _port_sets(program, value):
            if len(ports) > 1:
                for port in sorted(ports):
                    program.rows.append(loop_row(program, port, ports))
    steps = program.problem.steps
    for values in cycles(program.problem):
        inner = [p for v in sorted(values) for p in program.problem.alternatives[v]]
        firsts = [program.firsts[p] for p in inner if values.isdisjoint(steps[p].inputs)]
        for value in sorted(values):
            program.at_least(firsts, (program.computed[value],))


def loop_row(program: Formulation, port: Port, ports: frozenset[Port]) -> LinearRow:
    """Return written[q] ≤ Σ_{k enters Q} use[k] for a port q of a set Q of ports.

    If a solution has a cycle of kernels, the rows for the ports in the cycle forbid it.

    Proof: if q is written, consider the first port of Q to be written. The kernel that writes it reads
    no port of Q, since no port of Q is written before.
    """
    terms = dict.fromkeys(program.entries(ports), 1)
    return LinearRow((*terms, program.ports[port]), (*terms.values(), -1), 0)


def cycles(problem: Problem) -> list[frozenset[int]]:
    """Return the strongly connected sets of two or more non-given values."""
    after: dict[int, list[int]] = {v: [] for v in problem.alternatives}
    for step in problem.steps:
        for value in step.inputs:
            if value in after and not {value, step.output} & problem.given_values:
                after[value].append(step.output)
    return [frozenset(c) for c in strong_components(after) if len(c) > 1]


def _column(program: Formulation, port: Port) -> Sequence[int]:
    column = program.ports.get(port)
    return () if column is None else (column,)


def _port_sets(program: Formulation, value: int) -> list[frozenset[Port]]:
    """Return the sets of a value's ports that are written by kernels and not given."""
    ports = [q for q in program.layouts.get(value, ()) if not program.problem.is_given(q)]
    return [frozenset(c) for n in range(1, len(ports) + 1) for c in combinations(ports, n)]


def _union(needed: dict[int, int], values: Iterable[int]) -> int:
    mask = 0
    for value in values:
        mask |= needed.get(value, 0)
    return mask


def _shared(masks: Sequence[int]) -> int:
    """Return the bits that are in two or more masks."""
    once = twice = 0
    for mask in masks:
        twice |= once & mask
        once |= mask
    return twice
