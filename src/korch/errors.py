"""Every exception that Korch raises.

The class says whose fault it is, the text says what is wrong and where, what was expected and what
to do.
All of them are `KorchError`s, and the command line turns each into one message and exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class KorchError(Exception):
    """The root of all errors.

    Attributes:
        what: what is wrong, as one sentence without a full stop.
        where: the model, node, value or option that it is about; "" if there is none.
        expected: what was expected instead; "" if `what` says it.
        hint: what to do; "" if nothing sensible can be said.
    """

    what: str
    where: str = ""
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        expected = f"; expected {self.expected}" if self.expected else ""
        hint = f". {self.hint}" if self.hint else ""
        return f"{head}{expected}{hint}"


class ModelError(KorchError):
    """The model can't be read, or asks for what no version of ONNX defines: the model's fault."""


class UnsupportedError(KorchError):
    """The model is right, but Korch (or what is installed) can't run a part of it."""


class InputError(KorchError):
    """An executable was called with the wrong names, shapes or types: the caller's fault."""


class OptionError(KorchError):
    """An option has a value that makes no sense: the user's fault."""


class InvalidGraphError(KorchError):
    """A stage handed over a graph, program or plan that breaks a rule: Korch's own fault."""


class ProviderError(KorchError):
    """A provider broke its contract, or can't be loaded."""


class CompileError(KorchError):
    """There is no working compiler, or it refused a generated source."""


class MeasureError(KorchError):
    """No kernel could be measured; a single one that fails is a record, not an error."""


class InfeasibleError(KorchError):
    """No set of candidates computes the model's outputs."""


class InaccurateError(InfeasibleError):
    """Every plan differs from the reference by more than the tolerance."""


class UnprovidedError(InfeasibleError):
    """No provider runs a primitive of these types."""


class ArtifactError(KorchError):
    """An artifact is damaged, tampered with, or built for another machine."""


class ReplayError(KorchError):
    """A ledger does not fit the search that is to be replayed."""


def quoted(names: Iterable[object]) -> str:
    """Return names in quotes, separated by commas, as messages list them."""
    return ", ".join(map(repr, names)) or "none"
