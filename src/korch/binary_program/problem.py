"""Candidates, ports and costs as plain numbers: the instance that the solver gets.

An instance has no information on tensors. Primitives and values are integers. A *port* is a value in a
layout. A *kernel* is a candidate as the solver sees it: the ports that it reads and writes, the
primitives that it runs, and its cost. A plan is a sequence of kernels in which every port is written
before it is read, no port is written twice or owned twice, and every required port is written.

Recomputation is allowed (a primitive may be in several chosen kernels). A value may be the output
of several primitives, its alternatives, and these may form cycles. A change of layout is a kernel
without primitives.

In the terms of automated planning this is a delete-free task: ports are facts, kernels are actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from korch.errors import InvalidGraphError


class Port(NamedTuple):
    """A value in a layout: the unit that kernels read and write."""

    value: int
    layout: str

    def __str__(self) -> str:
        return f"%{self.value}:{self.layout}"


@dataclass(frozen=True, slots=True)
class Computation:
    """A primitive as the solver sees it.

    Attributes:
        output: the value that it computes.
        inputs: the values that it reads.
    """

    output: int
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PricedKernel:
    """A candidate as the solver sees it.

    Attributes:
        steps: the primitives that it runs; none for a change of layout.
        inputs: the ports that it reads, constants left out.
        outputs: the ports that it writes.
        cost_ns: what choosing it costs.
        is_measured: whether the cost is a measured time; otherwise it is a lower bound.
        owns: the ports that it reads whose memory becomes a part of what it writes. No two chosen
            kernels may own the same port.
        error: its contribution to the plan's error, in the same units as `Problem.most_error`.
    """

    steps: frozenset[int]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cost_ns: int
    is_measured: bool = False
    owns: tuple[Port, ...] = ()
    error: int = 0


@dataclass(frozen=True)
class Problem:
    """An instance.

    Attributes:
        steps: the primitives, numbered by position.
        kernels: the candidates, numbered by position.
        required: the ports that a plan must write: the model's outputs.
        given: the ports that exist from the start: the inputs, in the layouts of the interface.
        constants: the values known at build time; they are given in every layout.
        most_error: the largest sum of the errors of a plan's kernels.
        once: primitives that at most one kernel of a plan may run.
    """

    steps: tuple[Computation, ...]
    kernels: tuple[PricedKernel, ...]
    required: tuple[Port, ...]
    given: frozenset[Port] = frozenset()
    constants: frozenset[int] = frozenset()
    most_error: int = 0
    once: frozenset[int] = frozenset()

    @cached_property
    def alternatives(self) -> dict[int, tuple[int, ...]]:
        """The primitives that compute each value; values that no primitive computes are left out."""
        found: dict[int, list[int]] = {}
        for p, step in enumerate(self.steps):
            found.setdefault(step.output, []).append(p)
        return {value: tuple(steps) for value, steps in found.items()}

    @cached_property
    def given_values(self) -> frozenset[int]:
        """The values that exist from the start in some layout."""
        return self.constants | {port.value for port in self.given}

    def is_given(self, port: Port) -> bool:
        """Return whether a port exists from the start."""
        return port in self.given or port.value in self.constants

    def needs(self, k: int) -> tuple[Port, ...]:
        """Return the ports that kernel k reads and that some chosen kernel must write."""
        return self._needs[k]

    @cached_property
    def _needs(self) -> tuple[tuple[Port, ...], ...]:
        given, constants = self.given, self.constants
        return tuple(
            tuple(port for port in dict.fromkeys(kernel.inputs) if port not in given and port.value not in constants)
            for kernel in self.kernels
        )

    @cached_property
    def producers(self) -> dict[Port, tuple[int, ...]]:
        """The kernels that write each port; ports that no kernel writes are left out."""
        return _by_port(kernel.outputs for kernel in self.kernels)

    @cached_property
    def owners(self) -> dict[Port, tuple[int, ...]]:
        """The kernels that own each port; ports that no kernel owns are left out."""
        return _by_port(kernel.owns for kernel in self.kernels)

    def with_costs(self, costs_ns: Sequence[int], is_measured: Sequence[bool] | None = None) -> Problem:
        """Return the same instance with other costs.

        `is_measured`: whether each is measured; as before if not given.
        """
        flags = is_measured or [kernel.is_measured for kernel in self.kernels]
        kernels = tuple(
            PricedKernel(k.steps, k.inputs, k.outputs, cost_ns, flag, k.owns, k.error)
            for k, cost_ns, flag in zip(self.kernels, costs_ns, flags, strict=True)
        )
        found = replace(self, kernels=kernels)
        vars(found).update({**vars(self), "kernels": kernels})  # cached properties do not depend on costs
        return found

    def repeated(self, kernels: Iterable[int]) -> frozenset[int]:
        """Return the primitives of `once` that several of the kernels run."""
        runs = Counter(p for k in kernels for p in self.kernels[k].steps & self.once)
        return frozenset(p for p, count in runs.items() if count > 1)

    def without(self, excluded: Iterable[int]) -> tuple[Problem, tuple[int, ...]]:
        """Return the instance without some kernels, and the old number of each kept kernel."""
        gone = frozenset(excluded)
        kept = tuple(k for k in range(len(self.kernels)) if k not in gone)
        return replace(self, kernels=tuple(self.kernels[k] for k in kept)), kept


def _by_port(ports: Iterable[Sequence[Port]]) -> dict[Port, tuple[int, ...]]:
    """Return for each port the numbers of the kernels whose ports include it; `ports` has the ports of each kernel."""
    found: dict[Port, list[int]] = {}
    for k, own in enumerate(ports):
        for port in own:
            found.setdefault(port, []).append(k)
    return {port: tuple(kernels) for port, kernels in found.items()}


class Status(Enum):
    """Whether a plan exists, and whether it is proven optimal."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The cost of a plan, and the proven lower bound.

    Attributes:
        status: OPTIMAL only if objective and bound are the same number of nanoseconds.
        objective_ns: the sum of the plan's costs; None if there is no plan.
        bound_ns: lower bound of all plans' costs, for the instance's candidates and costs.
        kernels: how many candidates the bound covers.
        measured: how many of them have measured costs.
        is_measured: whether all chosen kernels have measured costs.
        seconds: how long the search took.
        calibrated_ns: a lower bound of all plans' costs if no unmeasured candidate undercuts its calibrated bound; None
            if that is not known.
    """

    status: Status
    objective_ns: int | None
    bound_ns: int
    kernels: int
    measured: int
    is_measured: bool
    seconds: float = field(default=0.0, compare=False)
    calibrated_ns: int | None = None

    @staticmethod
    def of(
        objective_ns: int, bound_ns: int, flags: Sequence[bool], chosen: Iterable[int], seconds: float
    ) -> Certificate:
        """Return the certificate of a plan.

        `bound_ns`: a lower bound; it is reduced to the plan's cost if it is larger. `flags`: per candidate, whether its
        cost is measured.
        """
        bound_ns = min(bound_ns, objective_ns)
        status = Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE
        is_measured = all(flags[k] for k in chosen)
        return Certificate(status, objective_ns, bound_ns, len(flags), sum(flags), is_measured, seconds)

    def __post_init__(self) -> None:
        objective_ns = self.objective_ns
        if (objective_ns is None) != (self.status in (Status.INFEASIBLE, Status.UNKNOWN)):
            raise InvalidGraphError(f"a certificate says {self.status.value} with objective {objective_ns}")
        if objective_ns is not None and (
            objective_ns < self.bound_ns or (objective_ns == self.bound_ns) != (self.status is Status.OPTIMAL)
        ):
            raise InvalidGraphError(
                f"a certificate says {self.status.value} with objective {objective_ns} ns and bound {self.bound_ns} ns"
            )

    @property
    def calibrated_gap(self) -> float | None:
        """The gap to the calibrated bound, or to the hard one if that is higher; None if it is not known."""
        if self.calibrated_ns is None or self.objective_ns is None:
            return None
        least_ns = max(self.calibrated_ns, self.bound_ns)
        return max(0.0, (self.objective_ns - least_ns) / (self.objective_ns or 1))

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective, 0 if both are 0; None if there is no plan."""
        if self.objective_ns is None:
            return None
        return (self.objective_ns - self.bound_ns) / (self.objective_ns or 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen kernels in an order in which they can run; none if no plan is known."""

    kernels: tuple[int, ...]
    certificate: Certificate
