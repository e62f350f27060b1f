"""Reductions along axes and over windows, and broadcasting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import Array, Attributes, Category, Op, flop_per_input, no_flop, require
from korch.primitive.types import DType, ValueType


@dataclass(frozen=True, slots=True)
class ReduceAttributes(Attributes):
    """The axes that are reduced; they remain in the shape with size 1."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolAttributes(Attributes):
    """A window over the trailing axes: sizes, strides, dilations, and pads with the operation's identity element."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    dilations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BroadcastAttributes(Attributes):
    """The shape to broadcast to, by NumPy's rules."""

    shape: tuple[int, ...]


def window_extent(kernel: int, dilation: int) -> int:
    """Return how many elements a dilated window of `kernel` taps spans."""
    return (kernel - 1) * dilation + 1


def windows(size: int, kernel: int, stride: int, pads: int, dilation: int) -> int:
    """Return how many windows fit an axis of `size` elements with `pads` padding elements in total."""
    return (size + pads - window_extent(kernel, dilation)) // stride + 1


def _infer_reduce(name: str) -> Callable[[Sequence[ValueType], ReduceAttributes], ValueType]:
    def infer(inputs: Sequence[ValueType], attributes: ReduceAttributes) -> ValueType:
        axes, given = attributes.axes, inputs[0]
        legal = tuple(sorted(set(axes))) == axes and all(0 <= axis < given.rank for axis in axes)
        require(legal, f"{name}: axes {axes} are not sorted, unique axes of {given}")
        return given.with_shape(tuple(1 if i in axes else n for i, n in enumerate(given.shape)))

    return infer


def _infer_pool(name: str) -> Callable[[Sequence[ValueType], PoolAttributes], ValueType]:
    def infer(inputs: Sequence[ValueType], attributes: PoolAttributes) -> ValueType:
        given, spatial = inputs[0], len(attributes.kernel)
        fields = (attributes.strides, attributes.pads_begin, attributes.pads_end, attributes.dilations)
        require(all(len(field) == spatial for field in fields), f"{name}: attributes differ in rank")
        require(spatial <= given.rank, f"{name}: {spatial} windows on {given}")
        lead = given.rank - spatial
        shape = list(given.shape[:lead])
        for i, kernel in enumerate(attributes.kernel):
            pads = attributes.pads_begin[i] + attributes.pads_end[i]
            count = windows(given.shape[lead + i], kernel, attributes.strides[i], pads, attributes.dilations[i])
            require(count >= 1, f"{name}: window {kernel} is larger than axis {lead + i} of {given}")
            shape.append(count)
        return given.with_shape(tuple(shape))

    return infer


def identity(op: str, dtype: DType) -> float | int:
    """Return the identity element of a reduction ("sum", "prod", "max" or "min"): accumulating it changes nothing."""
    if op in ("sum", "prod"):
        return (0 if op == "sum" else 1) * (1.0 if dtype.is_float else 1)
    if dtype.is_float:
        return -math.inf if op == "max" else math.inf
    if dtype is DType.BOOL:
        return 0 if op == "max" else 1
    bits = 8 * dtype.size_bytes
    is_signed = dtype.value.startswith("i")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return low if op == "max" else high


def _reduce(name: str) -> Callable[[Sequence[Array], ReduceAttributes], Array]:
    def reference(inputs: Sequence[Array], attributes: ReduceAttributes) -> Array:
        x = inputs[0]
        with np.errstate(all="ignore"):
            function = getattr(np, name)
            is_float = DType.of(x.dtype).is_float
            wide = x.astype(np.float64) if is_float and name in ("sum", "prod") else x
            out = function(wide, axis=attributes.axes, keepdims=True, initial=identity(name, DType.of(x.dtype)))
            return np.asarray(out).astype(x.dtype)

    return reference


def _pool(name: str) -> Callable[[Sequence[Array], PoolAttributes], Array]:
    def reference(inputs: Sequence[Array], attributes: PoolAttributes) -> Array:
        x, spatial = inputs[0], len(attributes.kernel)
        lead = x.ndim - spatial
        pads = [(0, 0)] * lead + list(zip(attributes.pads_begin, attributes.pads_end, strict=True))
        padded = np.pad(x, pads, constant_values=identity(name, DType.of(x.dtype)))
        extents = tuple(map(window_extent, attributes.kernel, attributes.dilations))
        view = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=tuple(range(lead, x.ndim)))
        steps = [slice(None)] * lead + [slice(None, None, s) for s in attributes.strides]
        view = view[tuple(steps) + tuple(slice(None, None, d) for d in attributes.dilations)]
        axes = tuple(range(x.ndim, x.ndim + spatial))
        with np.errstate(all="ignore"):
            return np.asarray(getattr(np, name)(view, axis=axes)).astype(x.dtype)

    return reference


def _pool_flop(inputs: Sequence[ValueType], attributes: PoolAttributes, output: ValueType) -> int:
    return output.size * math.prod(attributes.kernel)


def _infer_broadcast(inputs: Sequence[ValueType], attributes: BroadcastAttributes) -> ValueType:
    given, shape = inputs[0], attributes.shape
    lead = len(shape) - given.rank
    legal = lead >= 0 and all(n in (1, shape[lead + axis]) for axis, n in enumerate(given.shape))
    require(legal, f"broadcast: {given} does not broadcast to {shape}")
    return given.with_shape(shape)


def _reduce_row(name: str) -> Op:
    return Op(
        name=f"reduce_{name}",
        category=Category.REDUCE,
        arity=1,
        attributes=ReduceAttributes,
        infer=_infer_reduce(f"reduce_{name}"),
        reference=_reduce(name),
        work_flop=flop_per_input,
        source=f"ONNX Reduce{name.capitalize()}-18",
    )


def _pool_row(name: str) -> Op:
    return Op(
        name=f"pool_{name}",
        category=Category.REDUCE,
        arity=1,
        attributes=PoolAttributes,
        infer=_infer_pool(f"pool_{name}"),
        reference=_pool(name),
        work_flop=_pool_flop,
        source="ONNX MaxPool-12" if name == "max" else "ONNX AveragePool-19, without the division",
    )


ROWS: tuple[Op, ...] = (
    *(_reduce_row(name) for name in ("sum", "prod", "max", "min")),
    *(_pool_row(name) for name in ("sum", "max")),
    Op(
        name="broadcast",
        category=Category.BROADCAST,
        arity=1,
        attributes=BroadcastAttributes,
        infer=_infer_broadcast,
        reference=lambda inputs, attributes: np.broadcast_to(inputs[0], attributes.shape),
        work_flop=no_flop,
        source="ONNX Expand-13",
    ),
)
