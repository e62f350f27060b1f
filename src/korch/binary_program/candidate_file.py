"""A file of candidates and costs <-> instances: kernels that others have made and timed can be chosen from, too.

    {"given": ["x"], "required": ["y"], "candidates": [
     {"id": "conv", "inputs": ["x"], "outputs": ["h"], "cost_ns": 5000},
     {"id": "relu", "inputs": ["h"], "outputs": ["y"], "cost_ns": 1000},
     {"id": "conv+relu", "inputs": ["x"], "outputs": ["y"], "cost_ns": 5500}
    ]}

Inputs and outputs are ports with any names: what one candidate writes and another reads has the same name.
The fields of the records below are the fields of the objects; those with a default may be missing. The file of a
model that is searched in blocks is an object with the field "blocks", a list of such objects.

If a file describes primitives, a port is "value:layout". Then the solver knows which candidates run the same
primitive, which makes its bounds tighter, not other. Without them, each candidate is a primitive of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem
from korch.errors import ArtifactError, OptionError
from korch.records import read_object, read_record


@dataclass(frozen=True)
class PrimitiveRow:
    """A primitive.

    Attributes:
        output: the value that it computes.
        inputs: the values that it reads.
    """

    output: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class CandidateRow:
    """A candidate.

    Attributes:
        id: its name, which no other candidate has.
        inputs: the ports that it reads; those of constants are optional.
        outputs: the ports that it writes.
        cost_ns: what choosing it costs, an integer.
        primitives: the positions of the primitives that it runs; none for a change of layout.
        owns: the ports that it reads whose memory becomes a part of what it writes. No two chosen candidates may own
            the same port.
        is_measured: whether the cost is a measured time; false: it is a lower bound, or not known to be one.
        kernel: who makes it, and how.
        model: the file of an ONNX model that computes the same; "" if there is none.
    """

    id: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cost_ns: int
    primitives: tuple[int, ...] = ()
    owns: tuple[str, ...] = ()
    is_measured: bool = False
    kernel: str = ""
    model: str = ""


@dataclass(frozen=True)
class CandidateFile:
    """The candidates of a model or of a block.

    Attributes:
        required: the ports that a plan must write: the model's outputs.
        candidates: the candidates.
        given: the ports that exist from the start: the model's inputs.
        constants: the values that exist from the start in every layout (ports, if the file has no primitives).
        primitives: the primitives, numbered by position.
    """

    required: tuple[str, ...]
    candidates: tuple[CandidateRow, ...]
    given: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    primitives: tuple[PrimitiveRow, ...] = ()

    def to_problem(self) -> tuple[Problem, tuple[str, ...]]:
        """Return the instance, whose kernels are the candidates in order, and the names of its values."""
        numbers: dict[str, int] = {}

        def value(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        def ports(names: Sequence[str]) -> tuple[Port, ...]:
            if not self.primitives:
                return tuple(Port(value(name), "any") for name in names)
            parts = (name.rpartition(":") for name in names)
            return tuple(Port(value(first), layout) for first, _, layout in parts)

        steps = [Computation(value(p.output), tuple(map(value, p.inputs))) for p in self.primitives]
        kernels = []
        for row in self.candidates:
            run: Iterable[int] = row.primitives
            inputs, outputs = ports(row.inputs), ports(row.outputs)
            if not self.primitives:
                run = range(len(steps), len(steps) + len(outputs))
                steps += [Computation(port.value, tuple(read.value for read in inputs)) for port in outputs]
            kernels.append(PricedKernel(frozenset(run), inputs, outputs, row.cost_ns, row.is_measured, ports(row.owns)))
        given, constants = frozenset(ports(self.given)), frozenset(map(value, self.constants))
        return Problem(tuple(steps), tuple(kernels), ports(self.required), given, constants), tuple(numbers)

    @staticmethod
    def of_problem(problem: Problem, more: Sequence[Mapping[str, str]] = ()) -> CandidateFile:
        """Return the file of an instance without errors; `more` has other fields of each candidate."""
        rows = [
            CandidateRow(
                id=f"k{k}",
                inputs=tuple(map(str, kernel.inputs)),
                outputs=tuple(map(str, kernel.outputs)),
                cost_ns=kernel.cost_ns,
                primitives=tuple(sorted(kernel.steps)),
                owns=tuple(map(str, kernel.owns)),
                is_measured=kernel.is_measured,
                **(more[k] if more else {}),
            )
            for k, kernel in enumerate(problem.kernels)
        ]
        return CandidateFile(
            tuple(map(str, problem.required)),
            tuple(rows),
            tuple(map(str, sorted(problem.given))),
            tuple(f"%{value}" for value in sorted(problem.constants)),
            tuple(PrimitiveRow(f"%{s.output}", tuple(f"%{v}" for v in s.inputs)) for s in problem.steps),
        )


def format_candidates(files: Sequence[CandidateFile]) -> str:
    """Return the text of a file of candidates, with a line for each candidate and primitive."""
    texts = [_format(file) for file in files]
    return texts[0] + "\n" if len(texts) == 1 else '{"blocks": [\n' + ",\n".join(texts) + "\n]}\n"


def _format(file: CandidateFile) -> str:
    parts = []
    for each in fields(file):
        value = getattr(file, each.name)
        if value and each.name in ("candidates", "primitives"):
            lines = [
                json.dumps({k: v for k, v in asdict(row).items() if v or k in ("cost_ns", "inputs")}) for row in value
            ]
            parts.append(f' "{each.name}": [\n  ' + ",\n  ".join(lines) + "\n ]")
        elif value:
            parts.append(f' "{each.name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}"


def parse_candidates(text: str | bytes, where: str) -> tuple[CandidateFile, ...]:
    """Return the candidates of each block of a file.

    Raises:
        OptionError: the text is not such a file.
    """
    try:
        data = read_object(text, where)
        blocks = data["blocks"] if data.keys() == {"blocks"} else [data]
        files = tuple(read_record(CandidateFile, block, "the file") for block in blocks)
        for file in files:
            _check(file)
    except (ArtifactError, ValueError, TypeError) as error:
        what = error.what if isinstance(error, ArtifactError) else f"it can't be read: {error}"
        raise OptionError(what, where, hint="docs/reference/program.md has an example") from error
    return files


def _check(file: CandidateFile) -> None:
    """Check what the types of a file's fields don't say."""
    ids = [row.id for row in file.candidates]
    if twice := {name for name in ids if ids.count(name) > 1} if len(set(ids)) < len(ids) else ():
        raise ValueError(f"several candidates have the id {min(twice)!r}")
    for row in file.candidates:
        if row.cost_ns < 0:
            raise ValueError(f"the cost of {row.id!r} is negative")
        if not row.outputs:
            raise ValueError(f"candidate {row.id!r} has no outputs")
        if wrong := [p for p in row.primitives if not 0 <= p < len(file.primitives)]:
            raise ValueError(f"candidate {row.id!r} runs primitive {wrong[0]}, of {len(file.primitives)}")
