"""What a module writes to: inputs and buffers, whose new contents become results of the exported program.

A program of `torch.export` computes the new content of each tensor that the module writes to, and its signature says to
which tensor this belongs. Here such contents become the last results, and the buffers among the tensors become the last
inputs, so that the program is a function. Who calls it writes the contents back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from korch.errors import UnsupportedError

OVERLAP_WORK: Any = 10_000  # NumPy's types know -1 and 0 only
"""How much NumPy computes to find out whether two arrays have an element in common."""


@dataclass(frozen=True, eq=False)
class Effects:
    """The tensors that a module writes to."""

    states: Mapping[str, Any] = field(default_factory=dict)  # the module's buffers among them, by name
    written: tuple[int, ...] = ()  # the inputs whose new contents are the last results; buffers are the last inputs

    def split(self, results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of the module itself, and the new contents."""
        count = len(results) - len(self.written)
        return results[:count], results[count:]


NO_EFFECTS = Effects()


def expose_writes(program: Any, flat: Any, count: int, name: str) -> Effects:
    """Make the new contents of tensors results of a program, and the buffers among these tensors inputs.

    Args:
        program: an ExportedProgram without in-place operations, which is changed.
        flat: the module that it was traced from; its part "module" is the module itself.
        count: the number of its inputs.
        name: the module's name, for messages.

    Raises:
        UnsupportedError: it writes to a parameter.
    """
    signature = program.graph_signature
    if changed := list(getattr(signature, "parameters_to_mutate", {}).values()):
        raise UnsupportedError(
            f"it writes to {changed[0].removeprefix('module.')!r}, a parameter",
            where=f"module {name}",
            expected="a module that writes to buffers and inputs only",
            hint="Make it a buffer, or return the new value instead",
        )
    buffers = list(dict.fromkeys(signature.buffers_to_mutate.values()))
    inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    numbers = {spec.arg.name: i for i, spec in enumerate(inputs)}
    places = {target: count + k for k, target in enumerate(buffers)}
    moved = [spec for spec in signature.input_specs if spec.kind is InputKind.BUFFER and spec.target in places]
    moved.sort(key=lambda spec: places[spec.target])
    others = [spec for spec in signature.input_specs if spec not in moved]
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    pairs = list(zip(signature.output_specs, output.args[0], strict=True))
    ordered = [pair for is_write in (False, True) for pair in pairs if (pair[0].kind in kinds) is is_write]
    written = tuple(
        (places if spec.kind is OutputKind.BUFFER_MUTATION else numbers)[spec.target]
        for spec, _ in ordered
        if spec.kind in kinds
    )
    for spec in [*moved, *(spec for spec, _ in ordered if spec.kind in kinds)]:
        spec.kind = InputKind.USER_INPUT if spec in moved else OutputKind.USER_OUTPUT
        spec.target = None
    signature.input_specs[:] = [*others, *moved]
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for before, after in pairwise(nodes[spec.arg.name] for spec in signature.input_specs):
        before.append(after)
    signature.output_specs[:] = [spec for spec, _ in ordered]
    output.args = (tuple(node for _, node in ordered),)
    states = {target.removeprefix("module."): flat.get_buffer(target) for target in buffers}
    _declare(program, list(states.values()))
    return Effects(states, written)


def _declare(program: Any, states: Sequence[Any]) -> None:
    """Let a program of flat inputs and results say which there are, with states as its last inputs."""
    signature, ends = program.module_call_graph[0].signature, program.graph_signature
    inputs = [spec.arg for spec in ends.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec.arg for spec in ends.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    # Its lists of arguments stay empty: a decomposition replaces values, and does not rename them there.
    signature.forward_arg_names = [argument.name for argument in inputs]
    signature.in_spec = pytree.tree_structure((tuple(inputs), {}))
    signature.out_spec = pytree.tree_structure(tuple(outputs))
    if program.example_inputs is not None:
        program.example_inputs = ((*program.example_inputs[0], *states), {})


class _Writes(TorchDispatchMode):  # type: ignore[misc]
    """Notes the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = pytree.tree_leaves(given.get(argument.name))
                self.storages |= {storage_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return func(*args, **kwargs)


def storage_of(tensor: Any) -> int:
    """Return what identifies the memory of a tensor, with or without data."""
    return int(tensor.untyped_storage()._cdata)


def written_inputs(graph: Any, args: Sequence[Any]) -> frozenset[int]:
    """Return the positions of the inputs that a graph writes to; nothing is computed, and none is changed.

    `graph`: a function; what it does may not depend on values. If it fails, its export fails, too, so there are none.
    """
    writes = _Writes()
    try:
        with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [
                torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg
                for arg in args
            ]
            with writes:
                graph(*fakes)
    except Exception:  # noqa: BLE001 - the export says what is wrong
        return frozenset()
    tensors = {i: fake for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
    return frozenset(i for i, fake in tensors.items() if storage_of(fake) in writes.storages)


def shares_memory(args: Sequence[Any], written: frozenset[int]) -> bool:
    """Return whether an element of a tensor or array that is written to is also one of another one."""
    for near in _neighbours(args):
        if len(near) < 2 or written.isdisjoint(near):
            continue
        views = {i: _view(args[i]) for i in near}
        pairs = ((views[i], views[k]) for i in written & views.keys() for k in views if k != i)
        if any(np.may_share_memory(own, other, max_work=OVERLAP_WORK) for own, other in pairs):
            return True
    return False


def _neighbours(args: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the places of tensors and arrays whose storages overlap; those of most calls have a storage each."""
    spans = ((*_storage_span(arg), i) for i, arg in enumerate(args) if isinstance(arg, (torch.Tensor, np.ndarray)))
    found, end = list[int](), 0
    for begin, stop, i in sorted(spans):
        if begin >= end and found:
            yield found
            found = []
        found.append(i)
        end = max(end, stop)
    yield found


def _storage_span(arg: Any) -> tuple[int, int]:
    """Return the addresses of the first byte, and of the one after the last, of the memory that an argument is in."""
    if isinstance(arg, np.ndarray):
        reach = [(n - 1) * step for n, step in zip(arg.shape, arg.strides, strict=True)]
        first, back, ahead = arg.ctypes.data, sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        return (first + back, first + ahead + arg.itemsize) if arg.size else (first, first)
    storage = arg.untyped_storage()
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def _view(arg: Any) -> Any:
    """Return an array of the elements of an argument, of which only the places may be asked for."""
    if isinstance(arg, np.ndarray):
        return arg
    item = arg.element_size()
    fields = {"version": 3, "typestr": f"|V{item}", "data": (arg.data_ptr(), True), "shape": tuple(arg.shape)}
    fields["strides"] = tuple(step * item for step in arg.stride())
    return np.asarray(SimpleNamespace(__array_interface__=fields))


def span_of(tensor: Any) -> tuple[int, int]:
    """Return the offsets in its storage of a tensor's first element, and of one past its last, in bytes."""
    start, sizes = _size(tensor.storage_offset()), list(map(_size, tensor.shape))
    reach = sum((n - 1) * _size(step) for n, step in zip(sizes, tensor.stride(), strict=True))
    stop = start if 0 in sizes else start + reach + 1
    return start * tensor.element_size(), stop * tensor.element_size()


def _size(size: Any) -> int:
    """Return a size; for a symbolic size, its value in the example, without adding a guard."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)
