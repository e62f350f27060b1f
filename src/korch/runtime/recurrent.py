"""Sessions of models whose states keep their shape: each run replaces them, as the hidden states of a recurrent model.

A state is an input that an output of the same shape and element type replaces in the next run: h and h_out, or
past_conv.0 and present_conv.0. No elements are copied: the arrays that a run returns are the inputs of the next. If a
plan only writes rows of a state, they are written in the state's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from korch.errors import InputError, quoted
from korch.primitive.op import Array
from korch.system.alignment import aligned_bytes

if TYPE_CHECKING:
    from korch.runtime.runnable import Runnable, TensorInfo

MARKS = frozenset(("current", "final", "in", "init", "initial", "input", "last", "new", "next")) | frozenset(
    ("old", "out", "output", "past", "prev", "previous", "present", "updated")
)
"""Words by which the names of a state before and after a run differ."""


class RecurrentSession:
    """The states of a model between runs. It is used by one thread at a time.

    Attributes:
        executable: the model.
        pairs: the output that replaces each input that is a state, by its name.
    """

    def __init__(self, executable: Runnable, states: Mapping[str, str] | None = None) -> None:
        """Begin with states of zeros; `Runnable.session` makes it.

        `states`: the output of each state, by the input's name; None to take those whose names say so.

        Raises:
            InputError: there are no such tensors, they have different types, or the names leave it open.
        """
        self.executable = executable
        inputs = {info.name: info for info in executable.get_inputs()}
        outputs = {info.name: info for info in executable.get_outputs()}
        self.pairs = dict(states) if states is not None else pairs_of(inputs, outputs)
        for before, after in self.pairs.items():
            for name, known, kind in ((before, inputs, "input"), (after, outputs, "output")):
                if name not in known:
                    raise InputError(f"there is no {kind} {name!r}", "session", quoted(known))
            if not _is_same(inputs[before], outputs[after]):
                texts = [f"{info.type}{info.shape}" for info in (outputs[after], inputs[before])]
                raise InputError(f"the output {after!r} is {texts[0]}", f"state {before!r}", f"{texts[1]}, of one size")
        if len(set(self.pairs.values())) < len(self.pairs):
            raise InputError("an output is given for two states", "session", "one for each")
        self._types = {name: inputs[name] for name in self.pairs}
        self._states = {name: _copied(np.zeros(info.shape, info.dtype)) for name, info in self._types.items()}
        places = {
            (list(outputs).index(after), list(inputs).index(before)): before for before, after in self.pairs.items()
        }
        self._in_place = {pair[0]: places[pair] for pair in executable.in_place if pair in places}
        self._names = [name for name in inputs if name not in self.pairs]

    def run(self, *arrays: Any, **named: Any) -> tuple[Array, ...]:
        """Run the model, and keep the new states.

        Args:
            arrays: one for each input that is no state, in the model's order.
            named: instead of `arrays`, one for each of these inputs by its name.

        Returns:
            The outputs that are no states, in the model's order.

        Raises:
            InputError: an array is missing or has another type or shape; the states are then unchanged.
            ProviderError: a kernel failed; states of which rows are written in place may have new rows.
        """
        if arrays and (named or len(arrays) != len(self._names)):
            expected = f"{len(self._names)}: {quoted(self._names)}"
            raise InputError(f"{len(arrays)} arrays are given by position", "session", expected)
        if kept := [name for name in named if name in self.pairs]:
            raise InputError(f"{kept[0]!r} is a state", "session", "no array for it; `assign` sets it")
        given = dict(zip(self._names, arrays, strict=True)) if arrays else named
        into = {output: self._states[name] for output, name in self._in_place.items()}
        found = self.executable.run_into({**given, **self._states}, into)
        results = dict(zip((info.name for info in self.executable.get_outputs()), found, strict=True))
        self._states = {before: results.pop(after) for before, after in self.pairs.items()}
        return tuple(results.values())

    def states(self) -> dict[str, Array]:
        """Return a copy of each state, by the name of its input."""
        return {name: state.copy() for name, state in self._states.items()}

    def assign(self, states: Mapping[str, Any]) -> None:
        """Set states, by the names of their inputs; the others stay what they are.

        Raises:
            InputError: there is no such state, or an array has another type or shape; no state is changed.
        """
        from korch.runtime.runnable import ArrayType  # it imports this module

        if unknown := [name for name in states if name not in self.pairs]:
            raise InputError(f"there is no state {unknown[0]!r}", "session", quoted(self.pairs))
        own = {name: _copied(ArrayType.of(self._types[name]).accept(array)) for name, array in states.items()}
        self._states = {**self._states, **own}

    def reset(self) -> None:
        """Set all states to zeros."""
        self.assign({name: np.zeros(info.shape, info.dtype) for name, info in self._types.items()})

    def fork(self) -> RecurrentSession:
        """Return another session with the same states; neither changes those of the other."""
        found = RecurrentSession(self.executable, self.pairs)
        kept = self._in_place.values()
        found._states = {name: _copied(state) if name in kept else state for name, state in self._states.items()}
        return found


def pairs_of(inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the output that replaces each input, if their names differ only by words such as past and present.

    Raises:
        InputError: there are no such inputs, or an input or an output is in several pairs.
    """
    expected = "the output of each state: executable.session({'h': 'h_out'})"
    found = [
        (before, after)
        for before, own in inputs.items()
        for after, other in outputs.items()
        if _is_same(own, other) and _stem(before) == _stem(after) != []
    ]
    if not found:
        raise InputError("no output has the name, the shape and the type of an input", "session", expected)
    for side in zip(*found, strict=True):
        if doubtful := [name for name in side if side.count(name) > 1]:
            raise InputError(f"{doubtful[0]!r} is in several pairs of a state", "session", expected)
    return dict(found)


def _copied(array: Array) -> Array:
    """Return a copy in memory that is aligned like the outputs of a plan."""
    found: Array = aligned_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def _is_same(before: TensorInfo, after: TensorInfo) -> bool:
    is_fixed = all(isinstance(size, int) and size >= 0 for size in before.shape)
    return is_fixed and (before.shape, before.dtype) == (after.shape, after.dtype)


def _stem(name: str) -> Sequence[str]:
    """Return the words and numbers of a name without those of `MARKS`."""
    text = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    for digit in "0123456789":
        text = text.replace(digit, f" {digit} ")
    return [word for word in text.split() if word not in MARKS]
