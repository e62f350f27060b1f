"""Every exception that Korch raises.

The class says who caused the error. The message says what is wrong and where, what was expected, and
what to do. All of them are `KorchError`s; the command line prints one message for each and exits with code 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class KorchError(Exception):
    """The base class of all errors.

    Attributes:
        what: what is wrong, as one sentence without a full stop.
        where: the model, node, value or option that the error is about; "" if there is none.
        expected: what was expected instead; "" if `what` says it.
        hint: what to do about it; "" if there is no useful advice.
    """

    what: str
    where: str = ""
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        expected = f"; expected {self.expected}" if self.expected else ""
        hint = f". {self.hint}" if self.hint else ""
        return printable(f"{head}{expected}{hint}")


class ModelError(KorchError):
    """The model can't be read, or uses something that no version of ONNX defines: the model's fault."""


class UnknownSizeError(ModelError):
    """The model leaves the size of an input's axis open, and the caller gives none."""


class UnsupportedError(KorchError):
    """The model is valid, but Korch (or the installed packages) can't run a part of it."""


class InputError(KorchError):
    """An executable was called with the wrong names, shapes, types or indices: the caller's fault."""


class OptionError(KorchError):
    """An option has a value that makes no sense: the user's fault."""


class InvalidGraphError(KorchError):
    """A stage handed over a graph, program or plan that breaks a rule: Korch's own fault."""


class ProviderError(KorchError):
    """A provider broke its contract, or can't be loaded."""


class CompileError(KorchError):
    """LLVM rejected a generated source, or the runtime can't be compiled."""


class MeasureError(KorchError):
    """No kernel could be measured; the failure of a single kernel is recorded and raises no error."""


class InfeasibleError(KorchError):
    """No set of candidates computes the model's outputs."""


class InaccurateError(InfeasibleError):
    """Every plan differs from the reference by more than the tolerance."""


class UnprovidedError(InfeasibleError):
    """No provider runs a primitive with these element types."""


class ArtifactError(KorchError):
    """An artifact is damaged, tampered with, or built for another machine."""


class ReplayError(KorchError):
    """A ledger does not match the search that it is replayed for."""


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Return a text with its control characters as hexadecimal codes, since names of a model may contain any."""
    return text.translate(_CONTROLS)


def quoted(names: Iterable[object]) -> str:
    """Return names in quotes, separated by commas, as messages list them."""
    return ", ".join(map(repr, names)) or "none"


def excerpt(said: object, most: int = 300) -> str:
    """Return what other software said on one line; a text of more than `most` characters ends at a word, with "..."."""
    text = " ".join(str(said).split()) or type(said).__name__
    if len(text) <= most:
        return text
    return text[: most - 3].rpartition(" ")[0].rstrip(".,;:") + " ..."
