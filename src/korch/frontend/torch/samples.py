"""Inputs of a module that reach its masks, empty rows and boundaries, with the results of the module itself.

They follow from the example inputs and from how the module uses them: what is False, 0 or minus infinity in a mask, the
largest and the least index, negative numbers and zeros. Inputs that the module refuses are left out. A module with
operators of other packages gets the example inputs only: such operators may read anywhere for an index that is wrong.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

aten = torch.ops.aten

ATTEMPTS = 4
"""How many values are tried for an index, from the largest size of a tensor that it may be an index of."""

LOW = -1e4
"""Floats at most as large as this are those of a mask."""


@dataclass(frozen=True)
class ModuleInputs:
    """Inputs of a module."""

    name: str  # what is special, for messages
    inputs: list[Any]  # the tensors of a call
    outputs: list[Any]  # the tensors of the result


@dataclass(frozen=True)
class InputUse:
    """An input and how the module uses it."""

    given: Any  # the example
    sizes: frozenset[int]  # for integers, the sizes of the tensors that it may be an index of
    # for integers, negative numbers in the operators that take it, such as one for an ignored label
    negatives: frozenset[int]
    is_mask: bool  # whether it is added to the input of a softmax

    @cached_property
    def example(self) -> Any:
        """The example; random numbers if it is not finite or the same everywhere, since it then shows nothing."""
        x = self.given
        if not x.is_floating_point() or self.is_mask or x.numel() < 2:
            return x
        if bool(torch.isfinite(x).all()) and bool((x != x.reshape(-1)[0]).any()):
            return x
        generator = torch.Generator().manual_seed(0)
        return torch.randn(x.shape, generator=generator).to(x.dtype)

    def masked(self) -> Any:
        """Return the example with a first row that a mask hides."""
        hidden = {torch.bool: False}.get(self.given.dtype, -torch.inf if self.is_mask else 0)
        if self.given.is_floating_point() and not self.is_mask:
            return self.example
        return _with_start(self.given, self.given.shape[-1] if self.given.dim() else 1, hidden)

    def negative(self) -> Any:
        """Return negative numbers, or a mask that hides all but one row."""
        if self.given.dtype is torch.bool:
            return _with_start(torch.ones_like(self.given), self.given.numel() - self.given.shape[-1:].numel(), False)
        return self.example if self.is_mask or not self.given.is_floating_point() else -self.example.abs()

    def zero(self) -> Any:
        """Return zeros, or a mask that hides nothing."""
        return torch.ones_like(self.given) if self.given.dtype is torch.bool else torch.zeros_like(self.given)

    def ends(self) -> tuple[list[Any], list[Any]]:
        """Return what to try for the largest and for the least index."""
        if self.given.is_floating_point() or self.given.dtype is torch.bool:
            return [], []
        sizes = [size for size in self.sizes if size - 1 <= torch.iinfo(self.given.dtype).max]
        most = [torch.full_like(self.given, size - 1) for size in sorted(sizes, reverse=True)[:ATTEMPTS]]
        half = (self.given.numel() + 1) // 2
        least = [_with_start(self.given, half, n) for n in sorted({*self.negatives, -1})[:ATTEMPTS]]
        return most, least if self.given.dtype is not torch.uint8 else []


def samples(
    program: Any, tensors: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]], limit_s: float
) -> Iterator[ModuleInputs]:
    """Yield inputs of a module with its results; the example inputs come first.

    `run`: the module itself; it may raise any error for inputs that it does not take.
    """
    end_s = time.monotonic() + limit_s
    uses = uses_of(program, tensors)
    examples = [use.example for use in uses]
    most, least = list(examples), list(examples)
    tried: list[list[Any]] = []

    def attempt(name: str, inputs: list[Any]) -> ModuleInputs | None:
        if any(all(map(_equal, inputs, old)) for old in tried) or (tried and time.monotonic() > end_s):
            return None
        tried.append(inputs)
        try:
            return ModuleInputs(name, inputs, run(inputs))
        except Exception:  # noqa: BLE001 - the module's own code, whose errors have no base
            return None

    if not _is_of_pytorch(program):
        if found := attempt("the example inputs", list(tensors)):
            yield found
        return
    plan: list[tuple[str, list[Any]]] = [
        ("the example inputs", examples),
        ("a masked row", [use.masked() for use in uses]),
    ]
    for name, inputs in plan:
        if found := attempt(name, inputs):
            yield found
    for i, use in enumerate(uses):
        for name, side, values in zip(("largest", "least"), (most, least), use.ends(), strict=True):
            for value in values:
                if found := attempt(f"the {name} index", [*side[:i], value, *side[i + 1 :]]):
                    yield found
                    side[i] = value
                    break
    for name, make in (("negative numbers", InputUse.negative), ("zeros", InputUse.zero)):
        if found := attempt(name, [make(use) for use in uses]):
            yield found


def _is_of_pytorch(program: Any) -> bool:
    """Return whether all operators of a program are PyTorch's own."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return all(getattr(target, "namespace", "aten") in _OWN for target in targets)


def uses_of(program: Any, tensors: Sequence[Any]) -> list[InputUse]:
    """Return how a program uses its inputs."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    pairs = [
        (nodes[name], tensor)
        for name, tensor in zip(program.graph_signature.user_inputs, tensors, strict=True)
        if isinstance(tensor, torch.Tensor)
    ]
    known = {
        size.node.expr: int(n)
        for node, tensor in pairs
        for size, n in zip(node.meta["val"].shape, tensor.shape, strict=True)
        if isinstance(size, torch.SymInt)
    }
    return [_use(node, tensor, known) for node, tensor in pairs]


def _use(start: Any, given: Any, known: Mapping[Any, int]) -> InputUse:
    """Return the uses of an input, given the numbers of symbolic sizes."""
    sizes, negatives = set[int](), set[int]()
    is_mask = given.is_floating_point()
    todo, seen = [start], {start}
    while todo:
        for user in todo.pop().users:
            value = user.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype is given.dtype and user.target in _MOVES:
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
                continue
            is_mask &= user.target is aten.add.Tensor and any("softmax" in str(u.target) for u in user.users)
            tensors = [n.meta["val"] for n in user.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
            found = (
                n.node.expr.xreplace(known) if isinstance(n, torch.SymInt) else n for t in tensors for n in t.shape
            )
            sizes |= {int(n) for n in found if not getattr(n, "free_symbols", ())}  # others follow from elements
            defaults = [a.default_value for a in getattr(getattr(user.target, "_schema", None), "arguments", ())]
            negatives |= {a for a in (*user.args, *defaults) if type(a) is int and a < 0}
    is_mask |= given.is_floating_point() and bool((given <= LOW).any())
    return InputUse(given, frozenset(sizes), frozenset(negatives), is_mask)


_OWN = ("aten", "prims", "higher_order", "quantized_decomposed")
"""The namespaces of PyTorch's operators."""

_MOVES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.permute.default,
        aten.transpose.int,
        aten.clone.default,
        aten.alias.default,
        aten._to_copy.default,
    }
)
"""Operators that only move elements: what takes their result takes the input's elements."""


def _with_start(tensor: Any, count: int, value: Any) -> Any:
    """Return a copy of a tensor whose first elements have another value."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    flat[:count] = value
    return flat.reshape(tensor.shape)


def _equal(a: Any, b: Any) -> bool:
    return a is b or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
