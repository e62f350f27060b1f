"""Translates an ExportedProgram into an ONNX model whose weights are views of the parameters' memory.

Only two kinds of tensors are copied: constants that PyTorch's exporter computed by folding, and
tensors below `SMALL_BYTES`, which are stored in the model. Transposed weights are strided views. Like
all weights they are copied once, when the executable packs them for its kernels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from korch.errors import UnsupportedError
from korch.frontend.onnx import HeldModel
from korch.frontend.torch.quantized import translations
from korch.frontend.torch.trouble import export_trouble
from korch.frontend.torch.widen import widen_types
from korch.primitive.op import Array
from korch.system.extras import install_command

OPSET = 20
"""The version of ONNX's operators that modules are translated into."""

SMALL_BYTES = 256
"""Tensors of fewer bytes are stored in the model: sizes, axes, single numbers."""


def to_held_model(program: Any, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> HeldModel:
    """Return an exported program as ONNX. It replaces functions of PyTorch, so callers hold the lock `TRACING`.

    Raises:
        UnsupportedError: PyTorch has no translation of an operator, or onnxscript is missing.
    """
    if find_spec("onnxscript") is None:
        raise UnsupportedError(
            "PyTorch needs the package onnxscript to translate modules",
            where=f"module {name}",
            hint=f"Install it: {install_command('torch')}",
        )
    try:
        # In bfloat16, the exporter's optimizer would fold a batch normalization into float32 weights of a convolution.
        is_bfloat16 = any(tensor.dtype is torch.bfloat16 for tensor in program.state_dict.values())
        with _exporter_for(program):
            translated = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=OPSET,
                custom_translation_table=_translations(),
            )
        if not is_bfloat16:
            _simplify(translated.model)
    except Exception as error:  # third-party code may raise anything
        raise export_trouble(error, program, name) from error
    graph = translated.model.graph
    if len(graph.inputs) != len(inputs) or len(graph.outputs) != len(outputs):
        raise UnsupportedError(
            f"PyTorch translated it into a model with {len(graph.inputs)} inputs and {len(graph.outputs)} outputs",
            where=f"module {name}",
            expected=f"{len(inputs)} and {len(outputs)}",
        )
    _name_ends(graph, inputs, outputs)
    proto, arrays = _without_weights(translated.model)
    return HeldModel(proto, arrays, f"module {name}")


def decomposed(program: Any, own: Mapping[Any, Callable[..., Any]]) -> Any:
    """Return a program of operators that PyTorch's exporter translates; it would decompose others in a second pass.

    `own`: functions by the operator that they compute, which are preferred to PyTorch's.
    """
    table = dict(_decompositions(frozenset(_translations()))) if find_spec("onnxscript") else {}
    for operator, function in own.items():
        other = table.get(operator)
        table[operator] = function if other is None else partial(_either, function, other)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # as the exporter does
        return program.run_decompositions(table)


def _either(function: Callable[..., Any], other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    return other(*args, **kwargs) if found is NotImplemented else found


@cache
def _decompositions(translated: frozenset[Any]) -> Mapping[Any, Callable[..., Any]]:
    """Return PyTorch's functions that compute the operators that neither its exporter nor Korch translates."""
    from torch.onnx._internal.exporter import _decomp
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = _registry(vars(ONNXRegistry)["from_torchlib"], (), (("opset_version", OPSET),))
    known = _decomp.get_onnx_implemented_overloads(registry)
    return dict(_decomp.create_onnx_friendly_decomposition_table({*known, *translated}))


def _translations() -> dict[Any, Any]:
    """Return functions that write ONNX nodes, by PyTorch operator: those that the exporter lacks."""
    from onnxscript import ir, opset20
    from onnxscript.function_libs.torch_lib.ops import core

    def sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
        kind, side = ("linear", "nearest")[mode], ("zeros", "border", "reflection")[padding]
        return opset20.GridSample(x, grid, mode=kind, padding_mode=side, align_corners=int(align_corners))

    def scalar(s: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
        """Keep all digits of a number in float64: the exporter rounds it to float32 first."""
        if dtype == ir.DataType.DOUBLE and isinstance(s, int | float):
            return opset20.Constant(value=ir.tensor(s, ir.DataType.DOUBLE))
        return core.aten_scalar_tensor(s, dtype)

    aten = torch.ops.aten
    return {aten.grid_sampler_3d.default: sample, aten.scalar_tensor.default: scalar, **translations()}


def _simplify(model: Any) -> None:
    """Run the exporter's optimizer without its rules for operations with 0 and 1.

    They take numbers up to 1e-8 for 0 and those up to 1 + 1e-5 for 1, and so drop `x + 1e-8` and `x * 1.00001`.
    """
    from onnxscript import optimizer, rewriter

    rules, inexact = rewriter._DEFAULT_REWRITE_RULES, set(map(id, rewriter._no_op.rules))
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if id(rule) not in inexact)
    try:
        optimizer.optimize_ir(model)
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


@contextmanager
def _exporter_for(program: Any) -> Iterator[None]:
    """Adapt PyTorch's exporter to a program that was decomposed: it does not do so again, and keeps -0.0 and 0.0 apart.

    It also reads its translations of operators only once, which takes a second. Other threads may export programs of
    their own, which are decomposed.
    """
    from torch.onnx._internal.exporter import _building, _fx_passes
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    method, decompose = vars(ONNXRegistry)["from_torchlib"], _fx_passes.decompose_with_registry
    constant = _building._get_or_create_constant

    def own_copy(*args: Any, **kwargs: Any) -> Any:
        registry = copy(_registry(method, args, tuple(kwargs.items())))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    def as_it_is(other: Any, registry: Any) -> Any:
        if other is not program:
            return decompose(other, registry)
        found = copy(program)
        found._graph_module = deepcopy(program.graph_module)  # the exporter changes it
        return found

    def apart(constants: Any, number: Any, *rest: Any) -> Any:
        """Make a constant of its own for -0.0, which would be 0.0 if the program has that, too."""
        numbers = number if isinstance(number, Sequence) and not isinstance(number, str) else (number,)
        has_zero = any(isinstance(one, float) and str(one) == "-0.0" for one in numbers)
        return constant({} if has_zero else constants, number, *rest)

    ONNXRegistry.from_torchlib, _fx_passes.decompose_with_registry = staticmethod(own_copy), as_it_is
    _building._get_or_create_constant = apart
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib, _fx_passes.decompose_with_registry = method, decompose
        _building._get_or_create_constant = constant


@cache
def _registry(method: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return method.__get__(None, ONNXRegistry)(*args, **dict(kwargs))


def _without_weights(model: Any) -> tuple[Any, dict[str, Array]]:
    """Return the model as protobuf without its large tensors, and these tensors by name."""
    import onnx_ir as ir

    arrays: dict[str, Array] = {}
    kept: dict[str, Any] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < SMALL_BYTES:
            continue
        arrays[name] = tensor.numpy()
        kept[name] = tensor
        value.const_value = ir.ExternalTensor("memory", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name)
    proto = ir.to_proto(model)
    widen_types(proto)
    for name, tensor in kept.items():
        model.graph.initializers[name].const_value = tensor
    return proto, arrays


def _name_ends(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs; each output becomes a distinct value that is neither an input nor a weight."""
    import onnx_ir as ir

    taken = {value.name for node in graph for value in (*node.inputs, *node.outputs) if value}
    taken |= set(graph.initializers)
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = _free(name, taken)
    given = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for i, (value, name) in enumerate(zip(list(graph.outputs), outputs, strict=True)):
        if id(value) in given:
            node = ir.node("Identity", [value])
            graph.append(node)
            graph.outputs[i] = node.outputs[0]
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            value = node.outputs[0]
        given.add(id(value))
        value.name = _free(name, taken)


def _free(name: str, taken: set[str]) -> str:
    """Return the name, or one derived from it that is not taken, and mark it as taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
