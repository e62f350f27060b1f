"""A segment of the host, and inputs -> the engine whose results are right, and how that was checked.

Each node is computed by two references (`korch.primitive.agreed`), and the engine's results are compared with theirs.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import onnx

from korch.errors import ProviderError, UnsupportedError
from korch.frontend.fold import evaluate_split
from korch.frontend.infer import RANDOM, Known, find_schema, infer_types
from korch.frontend.names import captured_names, node_label
from korch.frontend.operator import Operator
from korch.frontend.segments import SegmentedModel
from korch.host.engine import HostEngine
from korch.host.executable import NativePart, accepted, describe, run_part
from korch.inputs import named_arrays, random_arrays, where_of
from korch.options import Options
from korch.primitive.agreed import OWN, Outputs, agreed, largest_difference, opinions_of

UNKNOWN_SIZE = 2
"""The size of the axes of random elements of sequences, if the model does not declare it."""

Values = Mapping[str, Any]
"""Arrays, lists of arrays for sequences, and None for an empty optional, by name."""


def random_value(name: str, proto: onnx.TypeProto | None, seed: int) -> Any:
    """Return a random value of an ONNX type.

    Raises:
        ProviderError: it is a map, or of an unknown type.
    """
    kind = proto.WhichOneof("value") if proto is not None else None
    if proto is None or kind not in ("tensor_type", "sequence_type", "optional_type"):
        raise ProviderError(f"there are no random values for the input {name!r}", hint="Give inputs with --inputs")
    if kind == "sequence_type":
        return [random_value(name, proto.sequence_type.elem_type, seed + i) for i in range(2)]
    if kind == "optional_type":
        return random_value(name, proto.optional_type.elem_type, seed)
    dims = proto.tensor_type.shape.dim
    shape = [dim.dim_value if dim.HasField("dim_value") else UNKNOWN_SIZE for dim in dims]
    if proto.tensor_type.elem_type == onnx.TensorProto.STRING:
        return np.array(["ab", "c d"] * int(np.prod(shape)), object)[: int(np.prod(shape))].reshape(shape)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.tensor_type.elem_type)
    return random_arrays({name: (shape, dtype)}, seed)[name]


class SegmentValues:
    """The values of a model, segment by segment, for the user's inputs or random ones."""

    def __init__(self, segmented: SegmentedModel, options: Options) -> None:
        """Set the inputs.

        Raises:
            KorchError: the user's inputs do not fit the model.
        """
        self._is_given, self._unknown = options.inputs is not None, ""
        self._known: dict[str, Any] = dict(segmented.constants)
        if options.inputs is not None:
            infos = [describe(name, proto) for name, proto in segmented.inputs]
            arrays = named_arrays(options.inputs, [info.name for info in infos], where_of(options.inputs))
            self._known |= accepted(infos, [arrays[info.name] for info in infos])
            return
        try:
            for i, (name, proto) in enumerate(segmented.inputs):
                self._known[name] = random_value(name, proto, options.search.seed + i)
        except ProviderError as error:
            self._unknown = str(error)

    def given(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Return the named values if they follow from the user's inputs, else None."""
        return {name: self._known[name] for name in names} if self._is_given else None

    def run(self, part: NativePart) -> None:
        """Compute the outputs of a native segment."""
        if not self._unknown:
            self._known |= run_part(part, self._known)

    def check(self, engine: HostEngine, model: onnx.ModelProto, limit_s: float | None) -> tuple[HostEngine, list[str]]:
        """Compute the outputs of a host segment.

        `limit_s`: the seconds after which a reference is given up; None if there is no limit.

        Returns:
            The engine whose results are right, and a text for each node that says how they were checked.

        Raises:
            ProviderError: the engine fails on the user's inputs.
            UnsupportedError: no engine has right results.
        """
        if not self._unknown:
            try:
                feeds = {item.name: self._known[item.name] for item in model.graph.input}
                engine, found, texts = check_host(engine, model, feeds, limit_s)
            except ProviderError as error:
                if self._is_given:
                    raise
                self._unknown = f"on random inputs {error.what}; give inputs with --inputs"
                engine = HostEngine(model, engine.threads)  # one that failed does not try ONNX Runtime again
            else:
                self._known |= found
                on = "the given inputs" if self._is_given else "random inputs"
                return engine, [f"{text} on {on}" if text.startswith("checked") else text for text in texts]
        return engine, [f"not checked: {self._unknown}"] * len(model.graph.node)


def check_host(
    engine: HostEngine, model: onnx.ModelProto, feeds: Values, limit_s: float | None = None
) -> tuple[HostEngine, dict[str, Any], list[str]]:
    """Check the results of a host segment.

    Returns:
        The engine whose results are right, its results, and a text for each node that says how they were checked.

    Raises:
        ProviderError: the engine fails on the inputs.
        UnsupportedError: no engine has right results.
    """
    found = engine.run(feeds)
    expected, names = _expected(model, feeds, limit_s)

    def is_right(results: Values) -> bool:
        return all(largest_difference(expected[name], results[name]) <= 1 for name in found if name in expected)

    if not is_right(found):
        engine = HostEngine(model, engine.threads, "its results are wrong")
        with suppress(ProviderError):
            found = engine.run(feeds)
        if not is_right(found):
            raise UnsupportedError(
                "neither ONNX Runtime nor onnx.reference computes what two references agree on",
                where=", ".join(node_label(node) for node in model.graph.node),
                hint="Replace the nodes, or cut the model before them",
            )
    alone = "not checked: no other reference computes the same on these inputs"
    alone += "" if limit_s is None else f" within {limit_s:.0f} s"
    texts = []
    for node, agreeing in zip(model.graph.node, names, strict=True):
        others = [name for name in agreeing or () if name != engine.name]
        if agreeing is None:
            is_random = node.op_type in RANDOM and not node.domain
            texts.append(f"not checked: its {'output is random' if is_random else 'inputs are random or unknown'}")
        else:
            texts.append(f"checked by {' and '.join(others)}" if others else alone)
    return engine, found, texts


def _expected(
    model: onnx.ModelProto, feeds: Values, limit_s: float | None
) -> tuple[dict[str, Any], list[tuple[str, ...] | None]]:
    """Return the values of a segment on which two references agree, by name, and for each node these references.

    For a node that is random, or of which an input is not known, there is None.
    """
    end_s = time.monotonic() + (limit_s or 0)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} | dict(feeds)
    types = {item.name: item.type for item in (*model.graph.input, *model.graph.output)}
    agreeing: list[tuple[str, ...] | None] = []
    unsure: set[str] = set()
    for node in model.graph.node:
        read = [name for name in dict.fromkeys((*node.input, *captured_names(node))) if name]
        if node.op_type in RANDOM or any(name not in values for name in read):
            agreeing.append(None)
            continue
        given = {name: values[name] for name in read}
        one = _alone(model, node, given, types)
        opinions = opinions_of(one, given, None if limit_s is None else end_s - time.monotonic())
        opinions[OWN] = partial(_own, node, one, given)
        found, names = agreed(node_label(node), opinions) or ((), ())
        agreeing.append(names)
        values |= dict(zip((name for name in node.output if name), found, strict=bool(found)))
        if len(names) < 2 or unsure.intersection(read):
            unsure.update(node.output)
    return {name: value for name, value in values.items() if name not in unsure}, agreeing


def _own(node: onnx.NodeProto, one: onnx.ModelProto, given: Values, like: Outputs | None) -> Outputs | None:
    """Return the outputs of a node computed by primitives, if there are some for it."""
    opsets = {item.domain: item.version for item in one.opset_import}
    schema = find_schema(node, opsets, "host")
    types = infer_types(node, schema, Known(opsets, {}, given, "host"))
    found = evaluate_split(Operator.of(node, opsets[node.domain], node.output), types, given, "host")
    return None if found is None else [a for a, name in zip(found, node.output, strict=True) if name]


def _alone(
    model: onnx.ModelProto, node: onnx.NodeProto, given: Values, types: Mapping[str, onnx.TypeProto]
) -> onnx.ModelProto:
    """Return a model of one node of a segment, for the values that it reads."""

    def info(name: str) -> onnx.ValueInfoProto:
        item = onnx.ValueInfoProto(name=name)
        if (proto := _type(given[name]) if name in given else None) or (proto := types.get(name)):
            item.type.CopyFrom(proto)
        return item

    graph = onnx.helper.make_graph([node], "node", map(info, given), [info(name) for name in node.output if name])
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _type(value: Any) -> onnx.TypeProto | None:
    """Return the type of a value; None if it does not show it."""
    if isinstance(value, list):
        element = _type(value[0]) if value else None
        if element is None:
            return None
        element.tensor_type.ClearField("shape")
        return onnx.helper.make_sequence_type_proto(element)
    if value is None:
        return None
    array = np.asarray(value)
    dtype = onnx.TensorProto.STRING if array.dtype.kind in "OSUT" else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_type_proto(dtype, array.shape)
