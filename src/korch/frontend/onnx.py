"""Reads an ONNX file as an operator graph.

The file is read and its names are checked; local functions are inlined; input shapes are bound;
then one walk over the nodes infers static types, folds constants and expands composite operators
(`propagate.py`). Nodes and values that no output needs are dropped before and after the walk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from korch.errors import ModelError, UnsupportedError, quoted
from korch.frontend.defaults import choose_defaults, with_type
from korch.frontend.experts import gather_experts
from korch.frontend.functions import inline_functions
from korch.frontend.infer import check_opsets, modernized
from korch.frontend.names import has_legal_names, order_nodes, subgraphs
from korch.frontend.operator import OperatorGraph
from korch.frontend.propagate import Host, Propagation
from korch.frontend.recurrent import replace_batch_first
from korch.frontend.segments import SegmentedModel, cut_segments
from korch.frontend.shapes import bind_inputs, check_declared_outputs, is_number_tensor
from korch.frontend.tensors import read_tensor
from korch.primitive.op import Array
from korch.system.files import open_file

P = TypeVar("P", onnx.NodeProto, onnx.ValueInfoProto)

logger = logging.getLogger("korch.frontend")

LARGEST_PROTOBUF = (1 << 31) - 1
"""The most bytes of a serialized model."""


@dataclass(frozen=True, eq=False)
class HeldModel:
    """A parsed model whose large tensors are kept in memory beside it, so that they are not written or copied."""

    proto: onnx.ModelProto  # the model; it has only the name, type and shape of an initializer in `arrays`
    # elements of initializers by name; they may be views of memory with another owner
    arrays: Mapping[str, Array] = field(default_factory=dict)
    name: str = "model"  # the model's name, for messages

    def stored(self) -> onnx.ModelProto:
        """Return the model with copies of its tensors in it, for readers that take only a ModelProto."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self.arrays:
                array = np.ascontiguousarray(self.arrays[tensor.name])
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        return proto


ModelSource: TypeAlias = str | Path | bytes | onnx.ModelProto | HeldModel
"""A path, the bytes of an ONNX file, or a model in memory."""


def load_model(model: ModelSource | LoadedModel, shapes: Mapping[str, Sequence[int]] | None = None) -> OperatorGraph:
    """Read an ONNX model.

    Args:
        model: the path of a file, its content, the parsed model, a `HeldModel`, or what `read_model`
            returned. A model with external data must be given by path, because this data is
            looked up in the file's folder.
        shapes: shapes of inputs by name; needed for those that the model leaves open.

    Returns:
        The operators that the outputs need, with static types.

    Raises:
        ModelError: the model can't be read or breaks the rules of ONNX, or a dimension is unknown.
        OptionError: `shapes` does not fit the model.
        UnsupportedError: the model is valid, but uses a feature that Korch can't run.
    """
    loaded = model if isinstance(model, LoadedModel) else read_model(model)
    try:
        return _load(loaded, shapes)
    except UnsupportedError as error:
        if not loaded.defaults:
            raise
        found = _load(loaded.without_defaults(), shapes)
        logger.warning("%s: %s are constants, not inputs: %s", loaded.name, quoted(loaded.defaults), error)
        return found


def _load(loaded: LoadedModel, shapes: Mapping[str, Sequence[int]] | None) -> OperatorGraph:
    types, constants = dict(bind_inputs(loaded.declared, shapes or {}, loaded.name)), dict(loaded.constants)
    nodes = gather_experts(loaded.name, loaded.opsets, types, loaded.nodes, constants, loaded.outputs)
    walk = Propagation(loaded.name, loaded.opsets, types, constants, loaded.outputs)
    walk.sized = None if loaded.sized is None else set(loaded.sized)
    walk.walk(nodes)
    check_declared_outputs(loaded.declared_outputs, walk.types, loaded.name)
    found = walk.graph([item.name for item in loaded.declared], loaded.outputs)
    return replace(found, defaults=loaded.defaults)


def load_segments(
    model: ModelSource, shapes: Mapping[str, Sequence[int]] | None = None, forced: Mapping[str, str] | None = None
) -> SegmentedModel:
    """Read an ONNX model of which some parts are not a graph of static tensors.

    `shapes`: shapes of inputs by name; needed for tensors that the model leaves open. `forced`: names of nodes that the
    host must run, with the reasons.

    Raises:
        ModelError: as for `load_model`.
        OptionError: as for `load_model`.
        UnsupportedError: it uses a feature that the host can't run either.
    """
    loaded = read_model(model)
    tensors = [item for item in loaded.declared if is_number_tensor(item)]
    untyped = {item.name: item.type for item in loaded.declared if not is_number_tensor(item)}
    types, constants = dict(bind_inputs(tensors, shapes or {}, loaded.name)), dict(loaded.constants)
    nodes = gather_experts(loaded.name, loaded.opsets, types, loaded.nodes, constants, loaded.outputs)
    walk = Propagation(loaded.name, loaded.opsets, types, constants, loaded.outputs, Host(forced or {}, untyped))
    walk.walk(nodes)
    check_declared_outputs(loaded.declared_outputs, walk.types, loaded.name)
    inputs = [item.name for item in loaded.declared]
    return replace(cut_segments(loaded.name, walk, inputs, loaded.outputs, loaded.ir_version), defaults=loaded.defaults)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that was read, with its names checked and its nodes in order."""

    name: str
    ir_version: int
    opsets: Mapping[str, int]
    declared: list[onnx.ValueInfoProto]  # its inputs; those with a default are among them
    declared_outputs: list[onnx.ValueInfoProto]
    outputs: list[str]
    nodes: list[onnx.NodeProto]
    constants: dict[str, Array]  # elements by name
    defaults: dict[str, Array]  # elements of the inputs that need not be given, by name
    # the constants that follow from sizes, if the model is read for several sizes; None if all constants are folded
    sized: frozenset[str] | None = None

    def without_defaults(self) -> LoadedModel:
        """Return the model with constants in place of the inputs that have a default."""
        declared = [item for item in self.declared if item.name not in self.defaults]
        return replace(self, declared=declared, constants=self.constants | self.defaults, defaults={})


def read_model(model: str | Path | bytes | onnx.ModelProto | HeldModel) -> LoadedModel:
    """Read an ONNX model without inferring types; `load_model` infers them for each binding of its dimensions.

    Raises:
        ModelError: as for `load_model`.
        UnsupportedError: as for `load_model`.
    """
    proto, name, folder = _read(model)
    proto = modernized(inline_functions(proto, name), name)
    graph = proto.graph
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
    check_opsets(opsets, name)
    if graph.sparse_initializer:
        raise UnsupportedError(
            f"the initializer {graph.sparse_initializer[0].values.name!r} is sparse", where=name, hint="Store it dense"
        )
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    outputs = [item.name for item in graph.output]
    _check_names(graph, outputs, name)
    given = list(replace_batch_first(graph.node))
    nodes = order_nodes(given, [*initializers, *(item.name for item in graph.input)], outputs, name)
    used = {n for node in nodes for n in node.input} | set(outputs) | _captured(nodes)
    held = model.arrays if isinstance(model, HeldModel) else {}
    constants = {
        n: held[n] if n in held else read_tensor(tensor, folder, name)
        for n, tensor in initializers.items()
        if n in used
    }
    defaults = choose_defaults(proto, constants, name)
    declared = [
        with_type(item, defaults.get(item.name))
        for item in graph.input
        if item.name not in initializers or item.name in defaults
    ]
    constants = {n: array for n, array in constants.items() if n not in defaults}
    for n in constants.keys() - held.keys():
        constants[n].flags.writeable = False  # its digest is computed once
    version, ends = proto.ir_version, _alone(graph.output)
    return LoadedModel(name, version, opsets, _alone(declared), ends, outputs, _alone(nodes), constants, defaults)


def _alone(parts: Iterable[P]) -> list[P]:
    """Return copies of parts of a model: the parts themselves keep the memory of the whole model, with its weights."""
    found = []
    for part in parts:
        found.append(type(part)())
        found[-1].CopyFrom(part)
    return found


def _captured(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    from_inside: set[str] = set()
    for node in nodes:
        for graph in subgraphs(node):
            from_inside |= {n for inner in graph.node for n in inner.input}
            from_inside |= {item.name for item in graph.output} | _captured(graph.node)
    return from_inside


def _read(model: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, str, Path | None]:
    """Return the parsed model, its name for messages, and its folder."""
    if isinstance(model, HeldModel):
        return _checked(model.proto, model.name), model.name, None
    if isinstance(model, onnx.ModelProto):
        return _checked(model, "model"), "model", None
    if isinstance(model, bytes):
        return _parse(model, "model"), "model", None
    path = Path(model)
    try:
        with open_file(path) as stream:
            if os.fstat(stream.fileno()).st_size > LARGEST_PROTOBUF:
                raise _too_long(str(path))
            content = stream.read()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"the model can't be read ({reason})", where=str(path)) from error
    return _parse(content, str(path)), str(path), path.parent


def _too_long(name: str) -> ModelError:
    return ModelError(
        "it has more than 2 GiB, and no ONNX file has",
        where=name,
        hint="Export it again with its weights as external data",
    )


def _parse(content: bytes, name: str) -> onnx.ModelProto:
    if not content:
        raise ModelError("the file is empty", where=name, expected="an ONNX model")
    if len(content) > LARGEST_PROTOBUF:
        raise _too_long(name)
    kind = _other_kind(content)
    if kind is None:
        try:
            return _checked(onnx.ModelProto.FromString(content), name)
        except DecodeError as error:
            if Path(name).suffix not in TORCH_SUFFIXES:
                raise ModelError(
                    "this is no ONNX model, or it was cut short", where=name, hint="Export or download it again"
                ) from error
            kind = _TORCH
    what, hint = kind
    raise ModelError(f"it is {what}, not an ONNX model", where=name, hint=hint)


TORCH_SUFFIXES = (".pt", ".pth", ".pt2", ".ckpt")
_TORCH = (
    "a file of PyTorch's",
    "Load the module in Python and call korch.optimize(module, example_inputs), or export it with torch.onnx.export",
)


def _other_kind(content: bytes) -> tuple[str, str] | None:
    """Return the kind of a file that users confuse with ONNX models, and a hint; None for any other file."""
    if content.startswith(b"PK") and b"manifest.json" in content[:64]:
        return "a Korch artifact", "It is optimized already: `korch run` and `korch.load` take it"
    if content.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        return _TORCH
    if content[4:8] == b"ORTM":
        return "in ONNX Runtime's own format", "Give the ONNX file that it was made from"
    return None


def _checked(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    if not (proto.ir_version and proto.HasField("graph") and proto.opset_import):
        raise ModelError(
            "this is no ONNX model, or it was cut short: it has no version, graph or opset",
            where=name,
            hint="Export or download it again",
        )
    if not has_legal_names(proto.graph):
        raise ModelError("a name in it is no UTF-8 text", where=name, hint="Export or download it again")
    return proto


def _check_names(graph: onnx.GraphProto, outputs: Sequence[str], name: str) -> None:
    if not outputs:
        raise ModelError("it has no output", where=name)
    for kind, items in (
        ("input", [item.name for item in graph.input]),
        ("initializer", [item.name for item in graph.initializer]),
        ("output", list(outputs)),
    ):
        seen: set[str] = set()
        for item in items:
            if item in seen:
                raise ModelError(f"two {kind}s are called {item!r}", where=name)
            seen.add(item)
