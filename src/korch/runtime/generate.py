"""Token ids in, token ids out: the loop around the sessions of a language model."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InputError, OptionError, quoted
from korch.primitive.op import Array
from korch.ranges.state import ROWS, TOTAL
from korch.runtime.stateful import Session, StatefulExecutable


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen.

    Raises:
        OptionError: a value is out of range.
    """

    temperature: float = 0.0  # what logits are divided by; 0 for the token with the greatest logit
    top_k: int = 0  # the number of tokens with the greatest logits that may be chosen; 0 for all
    seed: int = 0  # the seed of the random choices

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"the temperature is {self.temperature}", "option temperature", "a number, at least 0")
        if self.top_k < 0 or self.seed < 0:
            raise OptionError("it is negative", "option top_k" if self.top_k < 0 else "option seed", "at least 0")

    def choose(self, logits: Array, rng: np.random.Generator) -> int:
        """Return the chosen token for the logits of all tokens."""
        scores = logits.astype(np.float64)
        if not self.temperature:
            return int(scores.argmax())
        kept = np.argsort(-scores, kind="stable")[: self.top_k or None]
        weights = np.exp((scores[kept] - scores[kept[0]]) / self.temperature)
        return int(rng.choice(kept, p=weights / weights.sum()))


@dataclass(frozen=True, slots=True)
class Generated:
    """What `generate` returns."""

    tokens: tuple[int, ...]  # the new tokens
    prompt_s: float  # the seconds in which the prompt was read
    steps_s: float  # the seconds of all steps after it


def generate(
    executable: StatefulExecutable,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
    *,
    stop: Collection[int] = (),
    tell: Callable[[int], None] = lambda token: None,
) -> Generated:
    """Continue a prompt.

    Args:
        executable: a language model with a batch of 1; its inputs are token ids, states, and masks or positions.
        prompt: the token ids of the prompt.
        count: the most new tokens.
        sampling: how tokens are chosen; by default the one with the greatest logit. A model that ends with `ArgMax`
            has chosen them itself.
        stop: tokens after which nothing follows.
        tell: called with each new token.

    Raises:
        InputError: the model has other inputs or outputs, or the capacity does not suffice.
    """
    begun = time.perf_counter()
    steps = tokens(executable.session(), prompt, sampling or Sampling())
    found: list[int] = []
    prompt_s = 0.0
    for token in steps:
        prompt_s = prompt_s or time.perf_counter() - begun
        found.append(token)
        tell(token)
        if len(found) >= count or token in stop:
            break
    return Generated(tuple(found), prompt_s, time.perf_counter() - begun - prompt_s)


def tokens(session: Session, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Yield new tokens without end: the prompt and all tokens but the last one become rows of the session.

    Raises:
        InputError: the model has other inputs or outputs, or the capacity does not suffice.
    """
    if not len(prompt):
        raise InputError("the prompt has no tokens", "generate", "at least one")
    name, place = _ids_of(session.executable), _logits_of(session.executable)
    rng, next_ids = np.random.default_rng(sampling.seed), list(prompt)
    while True:
        found = session.run(**{name: np.array([next_ids])})[place]
        if found.dtype.kind != "i":
            token = sampling.choose(found.reshape(-1, found.shape[-1])[-1], rng)
        elif sampling.temperature:
            raise InputError("the model returns tokens, not logits", "generate", "a temperature of 0")
        else:
            token = int(found.reshape(-1)[-1])
        yield token
        next_ids = [token]


def _ids_of(executable: StatefulExecutable) -> str:
    """Return the name of the input with the token ids."""
    described = executable.described
    given = [t for i, t in enumerate(described.inputs) if i not in executable.state_inputs and TOTAL not in t.axes]
    ids = [t.name for t in given if "position" not in t.name]
    if len(ids) != 1 or next(t.axes for t in given if t.name == ids[0]) != ("1", ROWS):
        expected = "one input of token ids, 1 by rows, beside states, masks and positions"
        raise InputError(f"its inputs are {quoted([t.name for t in given])}", "generate", expected)
    return ids[0]


def _logits_of(executable: StatefulExecutable) -> int:
    """Return the position of the logits, or the chosen tokens, among the outputs that are no states."""
    names = executable.plain_outputs
    if len(names) == 1 or "logits" in names:
        return names.index("logits") if "logits" in names else 0
    raise InputError(f"its outputs are {quoted(names)}", "generate", "one output, or one that is called 'logits'")
