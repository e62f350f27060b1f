"""A fission rule, which splits one operator into primitives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from korch.fission.context import Context
from korch.primitive.types import ValueId


class NotSplitError(Exception):
    """A rule does not apply, for the reason that the text gives; the operator is then kept whole."""


Result = ValueId | Sequence[ValueId]
"""The outputs of an operator."""

Build = Callable[[Context], Result]


@dataclass(frozen=True, slots=True)
class FissionRule:
    """How one operator is split.

    Attributes:
        operator: the operator's name in the ONNX domain.
        build: emits primitives into a context and returns the operator's outputs; raises `NotSplitError`.
            It may leave out trailing outputs only if nothing reads them.
        first: the first opset for which the rule holds.
        last: the last opset, or None if the rule holds for the newest.
    """

    operator: str
    build: Build
    first: int = 7
    last: int | None = None

    def holds_for(self, opset: int) -> bool:
        """Return whether the rule is for this opset."""
        return self.first <= opset and (self.last is None or opset <= self.last)
