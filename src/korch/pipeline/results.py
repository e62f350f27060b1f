"""The results of the stages, each frozen, and set by one stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from korch.candidate.candidate import Candidate
from korch.cuda.runtime.executable import CudaExecutable
from korch.fission import KeptWhole
from korch.frontend.operator import OperatorGraph
from korch.measure.meter import AnyMeter
from korch.numerics import Standard
from korch.pipeline.precision import Precision
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.form import Sizes
from korch.ranges.plan import AtSizes
from korch.runtime.executable import Executable
from korch.search.ledger import Ledger
from korch.segments.block import Partition
from korch.segments.block_task import BlockTask
from korch.segments.join import Joined
from korch.segments.search import Outcome
from korch.tile.ir.program import TileProgram


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model's primitives."""

    graph: PrimitiveGraph  # the primitives
    # a quantized model's original primitives, with which plans are compared: `graph` may compute with bytes where these
    # compute with floats
    quantized: PrimitiveGraph | None = None
    precision: Precision | None = None  # the less precise forms of products, if there is a budget of errors
    kept: tuple[KeptWhole, ...] = ()  # the operators that fission kept whole

    @property
    def weights_bytes(self) -> int:
        """The size of the model's constants."""
        return self.graph.weights_bytes


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The segments of a model with their alternatives, and the graph of all of them."""

    partition: Partition
    joined: Joined


@dataclass(frozen=True, slots=True)
class Offered:
    """The candidates of a model."""

    meter: AnyMeter  # builds and times kernels
    ledger: Ledger  # has the questions of the search and their answers
    # the blocks with their candidates; none if the kernels of another size's plan are used
    tasks: Sequence[BlockTask] = ()


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """A plan for a range."""

    timed: Sizes  # the sizes for which its kernels are timed
    steps: tuple[Candidate, ...]  # its kernels
    measured: tuple[AtSizes, ...] = ()  # their sums at these and other sizes


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of a model; for a range, also the plans for several sizes, of which the first is the best plan."""

    outcome: Outcome
    sized: Sequence[SizedPlan] = ()

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The kernels of the plan that is predicted to be the fastest."""
        return next(iter(self.outcome.plans.values()))


Programs = tuple[tuple[Candidate, TileProgram | None], ...]
"""The kernels of the best plan with their tile programs; None for a kernel that is not generated from one."""


@dataclass(frozen=True, slots=True)
class Built:
    """The executable, and for a range the executables of all plans."""

    executable: Executable | CudaExecutable
    sized: Sequence[tuple[SizedPlan, Executable]] = ()


class StageResults(TypedDict, total=False):
    """The results of the stages that have run, by the stage's name."""

    frontend: OperatorGraph
    fission: SplitModel
    saturate: Rewritten
    reference: Standard
    candidates: Offered
    orchestrate: Planned
    lower: Programs
    build: Built
