"""A model whose caches get new rows -> one whose caches have the rows in use, and the inputs that count these rows.

An output that is an input with rows appended is written by `Concat`, or by an operator of attention that does the same.
A cache of a fixed capacity C, of which p rows are in use, becomes one of p rows to which new ones are appended. This is
the same function if the new rows are written at place p, and nothing reads rows behind them: what is not masked by a
number of valid rows is refused, and each number that a node reads is compared with those of the rows when the model is
loaded.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import onnx

from korch.errors import UnsupportedError
from korch.frontend.cached import SHARES
from korch.frontend.names import captured_names, node_label, order_nodes, subgraphs
from korch.frontend.onnx import LoadedModel, load_model
from korch.frontend.operator import OperatorGraph
from korch.frontend.shapes import dtype_of
from korch.primitive.types import DType
from korch.ranges.state import COUNTS, LAST, ONES, PAST, PLACES, TOTAL, counted

AnyProto = TypeVar("AnyProto", onnx.ValueInfoProto, onnx.NodeProto)

MICROSOFT = "com.microsoft"
MULTI, GROUP, MASKED = "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"

WRITERS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Concat"): ((0, 0),),
    ("", "TensorScatter"): ((0, 0),),
    ("", "Attention"): ((4, 1), (5, 2)),
    (MICROSOFT, GROUP): ((3, 1), (4, 2)),
    (MICROSOFT, MULTI): ((6, 1), (7, 2)),
    (MICROSOFT, MASKED): ((5, 1), (6, 2)),
}
"""The operators that append rows: the positions of the cache among their inputs, and among their outputs."""

READS: Mapping[tuple[str, str], Mapping[int, str]] = {
    ("", "TensorScatter"): {2: PAST},
    (MICROSOFT, GROUP): {5: LAST, 6: TOTAL},
    (MICROSOFT, MASKED): {7: PAST},
}
"""The positions of the inputs that count rows, and what they count."""

MOST_CHOICES = 64
"""The most choices of what counters may have that are tried."""

COPY = ":rows"
"""The end of the names of copies that counts are computed from."""

VALID, MASK = 6, 3
"""The positions of the inputs of Attention that say which rows of a cache are read."""


@dataclass(frozen=True)
class Cache:
    """An input of a model, and the output that has its rows and new ones."""

    input: str  # the input's name
    axis: int  # the axis of the rows
    node: onnx.NodeProto  # what writes the rows
    output: str  # the value that the node writes
    is_fixed: bool  # whether the input has a fixed capacity


@dataclass(frozen=True)
class Need:
    """A number of rows that a node reads."""

    value: str  # the value that the node reads
    count: str  # what it counts
    label: str  # the node


@dataclass(frozen=True)
class Counter:
    """An input that counts rows, or from which such a number is computed."""

    item: onnx.ValueInfoProto  # its name and type
    counts: tuple[str, ...]  # what it may have, as `COUNTS`

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return DType.of(onnx.helper.tensor_dtype_to_np_dtype(self.item.type.tensor_type.elem_type))

    def shape(self, binding: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Return its shape, from the size of each dimension."""
        given = binding.get(self.item.name)
        dims = self.item.type.tensor_type.shape.dim
        return tuple(given or (binding[d.dim_param][0] if d.dim_param else d.dim_value for d in dims))


@dataclass(frozen=True)
class AppendingModel:
    """A model whose caches have only the rows in use."""

    model: LoadedModel  # the model; what reads counts reads copies of the inputs that have them
    caches: tuple[Cache, ...]  # the caches
    needs: tuple[Need, ...] = ()  # the numbers that must be those of the rows
    counters: tuple[Counter, ...] = ()  # the inputs that count rows
    refused: tuple[UnsupportedError, ...] = ()  # why a cache that is written at a place is none of these
    capacity: int | None = None  # the most rows of its caches; None if they have no limit

    @cached_property
    def choices(self) -> list[dict[str, str]]:
        """What each counter may have, by its name: at most `MOST_CHOICES`, the likely ones first."""
        names = [counter.item.name for counter in self.counters]
        found = itertools.product(*(counter.counts for counter in self.counters))
        return [dict(zip(names, own, strict=True)) for own in itertools.islice(found, MOST_CHOICES)]

    def load(
        self, binding: Mapping[str, tuple[int, ...]], counts: Mapping[str, str], past: int, rows: int
    ) -> OperatorGraph:
        """Return the operators for some sizes and numbers of rows.

        `counts`: what each counter has.

        Raises:
            ModelError: as `load_model`.
            UnsupportedError: as `load_model`, or a number is not that of the rows.
        """
        constants = dict(self.model.constants)
        for counter in self.counters:
            name = counter.item.name
            found = counted(counts[name], counter.shape(binding), past, rows)
            constants[_copied(name)] = found.astype(counter.dtype.numpy)
        kept = {name for item in self.model.declared for name in _names(item)}
        dropped = {name for counter in self.counters for name in _names(counter.item)} - kept
        own = {name: size for name, size in binding.items() if name not in dropped}
        outputs = list(dict.fromkeys([*self.model.outputs, *(need.value for need in self.needs)]))
        graph = load_model(replace(self.model, constants=constants, outputs=outputs), own)
        for need in self.needs:
            wanted = int(counted(need.count, (), past, rows))
            known = graph.constants.get(need.value)
            if known is None or (known != wanted).any():
                text = "computed from data" if known is None else f"{known.reshape(-1)[0]} with {past} + {rows} rows"
                name = need.value.removesuffix(COPY)
                raise UnsupportedError(
                    f"its number of rows {name!r} is {text}, so that rows are not appended to a state",
                    where=f"{self.model.name}: {need.label}",
                    expected=f"a number that follows from the rows: {wanted}",
                    hint="Give the number of earlier rows (--shape) to optimize without sessions",
                )
        return replace(graph, outputs=tuple(self.model.outputs))


def appending(model: LoadedModel) -> AppendingModel:
    """Return a model with its caches, none of which has a capacity."""
    model = replace(model, sized=frozenset())
    kept, refused, nodes = list[Cache](), list[UnsupportedError](), {id(node): node for node in model.nodes}
    needs: list[Need] = []
    readers = _readers(model)
    for cache in _caches(model):
        error = _refusal(model, cache, readers) if cache.is_fixed else None
        if error is not None:
            refused.append(error)
            continue
        kept.append(cache)
        needs += _needs(cache, readers)
        if cache.node.op_type == "TensorScatter":
            own = onnx.helper.make_node("Concat", cache.node.input[:2], cache.node.output, cache.node.name)
            own.attribute.append(onnx.helper.make_attribute("axis", cache.axis))
            nodes[id(cache.node)] = own
    needs = list(dict.fromkeys(needs))
    if not needs:
        return AppendingModel(model, tuple(kept), refused=tuple(refused))
    dims = {item.name: item.type.tensor_type.shape.dim for item in model.declared}
    sizes = [dims[cache.input][cache.axis].dim_value for cache in kept if cache.is_fixed]
    declared, returned = _uncapped(model, kept, readers)
    found = replace(model, declared=declared, declared_outputs=returned, nodes=list(nodes.values()))
    limit = min(filter(None, sizes), default=None)
    return replace(_with_counters(found, tuple(kept), needs), refused=tuple(refused), capacity=limit)


def unreturned(model: AppendingModel) -> UnsupportedError | None:
    """Return the error for an input that is a cache like the others, but that no output has with its new rows."""
    known = {cache.input: cache for cache in model.caches}
    dims = {item.name: item.type.tensor_type.shape.dim for item in model.model.declared}
    sizes = {dims[name][cache.axis].dim_param for name, cache in known.items()} - {""}
    outputs = {node.input[0]: node.output[0] for node in model.model.nodes if node.op_type == "Identity"}
    for node in model.model.nodes:
        for place, _ in WRITERS.get((node.domain, node.op_type), ()):
            name = "".join(node.input[place : place + 1])
            if name in dims and name not in known and sizes & {dim.dim_param for dim in dims[name]}:
                pairs = (f"{outputs.get(cache.output, cache.output)!r} for {own!r}" for own, cache in known.items())
                return UnsupportedError(
                    f"rows are appended to the input {name!r}, but no output returns them",
                    where=f"{model.model.name}: {node_label(node)}",
                    expected=f"an output for each cache, as {next(pairs)}",
                    hint="Export the model with all caches among its outputs",
                )
    return None


def _caches(model: LoadedModel) -> Iterator[Cache]:
    """Yield each input that is an output with new rows."""
    declared = {item.name: item.type.tensor_type.shape.dim for item in model.declared}
    results = {item.name: item.type.tensor_type.shape.dim for item in model.declared_outputs}
    returned = {name: name for name in model.outputs}
    for node in reversed(model.nodes):
        if node.op_type == "Identity" and node.output[0] in returned:
            returned[node.input[0]] = returned[node.output[0]]
        for place, result in WRITERS.get((node.domain, node.op_type), ()):
            if place >= len(node.input) or result >= len(node.output) or node.output[result] not in returned:
                continue
            name, output = node.input[place], node.output[result]
            rank = len(declared.get(name, ()))
            given = {a.name: a.i for a in node.attribute}
            axis = given.get("axis", -2) % rank if rank and not node.domain and node.op_type != "Attention" else 2
            if axis >= rank or (node.op_type == "Concat" and len(node.input) != 2):
                continue
            dims = [declared[name][axis], *results[returned[output]][axis : axis + 1]]
            same = len({(dim.dim_param, dim.dim_value) for dim in dims}) == 1 and len(dims) == 2
            is_shared = node.op_type == GROUP and (dims[0].dim_value > 0 or (same and bool(dims[0].dim_param)))
            is_fixed = node.op_type == "TensorScatter" or bool(given.get(SHARES, 0)) or is_shared
            yield Cache(name, axis, node, output, is_fixed)


def _readers(model: LoadedModel) -> dict[str, list[onnx.NodeProto]]:
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in model.nodes:
        for name in dict.fromkeys((*node.input, *captured_names(node))):
            found.setdefault(name, []).append(node)
    return found


def _refusal(
    model: LoadedModel, cache: Cache, readers: Mapping[str, Sequence[onnx.NodeProto]]
) -> UnsupportedError | None:
    """Return why a cache of a fixed capacity can't be one of the rows in use; None if it can."""

    def error(node: onnx.NodeProto, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what} of the cache {cache.input!r}, also those that are not in use, so that it is no state",
            where=f"{model.name}: {node_label(node)}",
            expected="attention that masks them",
            hint="Give the number of earlier rows (--shape) to optimize without sessions",
        )

    if others := [node for node in readers[cache.input] if node is not cache.node]:
        return error(others[0], "it reads all rows")
    if cache.node.op_type == "TensorScatter" and not any(cache.node.input[2:3]):
        return error(cache.node, "it writes the first rows")
    rank = next(len(item.type.tensor_type.shape.dim) for item in model.declared if item.name == cache.input)
    for node in _reads(cache.output, readers):
        is_masked = node.op_type == "Attention" and any(node.input[VALID:]) and cache.axis == rank - 2
        if cache.node.op_type != "TensorScatter" or not is_masked:
            return error(node, "it reads all rows")
    return None


def _reads(value: str, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that read a value, perhaps under other names."""
    for node in readers.get(value, ()):
        if node.op_type == "Identity":
            yield from _reads(node.output[0], readers)
        else:
            yield node


def _needs(cache: Cache, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> Iterator[Need]:
    node = cache.node
    if node.op_type != MASKED or cache.is_fixed:
        for place, count in READS.get((node.domain, node.op_type), {}).items():
            if any(node.input[place : place + 1]):
                yield Need(node.input[place], count, node_label(node))
    if node.op_type == "TensorScatter":
        for reader in _reads(cache.output, readers):
            yield Need(reader.input[VALID], TOTAL, node_label(reader))


def _uncapped(
    model: LoadedModel, caches: Sequence[Cache], readers: Mapping[str, Sequence[onnx.NodeProto]]
) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """Return the inputs and outputs of a model with the number of rows in place of each capacity."""
    fixed = {cache.input: cache for cache in caches if cache.is_fixed}
    declared = [_copy(item) for item in model.declared]
    symbols = {_dim(item, fixed[item.name].axis).dim_param for item in declared if item.name in fixed} - {""}
    sizes = {_dim(item, fixed[item.name].axis).dim_value for item in declared if item.name in fixed} - {0}
    masks = {
        reader.input[MASK]
        for cache in fixed.values()
        for reader in _reads(cache.output, readers)
        if any(reader.input[MASK : MASK + 1])
    }
    for item in declared:
        if item.name in fixed:
            dim = _dim(item, fixed[item.name].axis)
            dim.dim_param = dim.dim_param or PAST
            continue
        for i, dim in enumerate(item.type.tensor_type.shape.dim):
            is_last = item.name in masks and i == len(item.type.tensor_type.shape.dim) - 1
            if dim.dim_param in symbols or (is_last and dim.dim_value in sizes):
                dim.dim_param = TOTAL
    returned = [_copy(item) for item in model.declared_outputs]
    for item in returned:
        for dim in item.type.tensor_type.shape.dim:
            if dim.dim_value in sizes:
                dim.Clear()
    return declared, returned


def _with_counters(model: LoadedModel, caches: tuple[Cache, ...], needs: Sequence[Need]) -> AppendingModel:
    """Return a model in which counts are computed from copies of the inputs that have them."""
    producers = {name: node for node in model.nodes for name in node.output if name}
    inputs = {item.name: item for item in model.declared if _is_integer(item)}
    copies: dict[str, onnx.NodeProto] = {}
    read: dict[str, set[str]] = {}

    def traced(name: str, direct: str) -> str:
        if name in inputs:
            read.setdefault(name, set()).add(direct)
            return _copied(name)
        node = producers.get(name)
        if node is None or any(True for _ in subgraphs(node)):
            return name
        if node.op_type in ("Shape", "Size") and node.input[0] not in inputs:
            return name
        found = [traced(own, "") for own in node.input]
        if found == list(node.input):
            return name
        own = _copy(node)
        own.name, own.input[:], own.output[:] = (
            _copied(node.name or node.output[0]),
            found,
            [_copied(n) for n in node.output],
        )
        copies[own.output[0]] = own
        return _copied(name)

    renamed = {need.value: traced(need.value, need.count) for need in needs}
    nodes = [*copies.values(), *(_reading(node, renamed, needs) for node in model.nodes)]
    given = [*model.constants, *(item.name for item in model.declared), *map(_copied, read)]
    wanted = [*model.outputs, *renamed.values()]
    ordered = order_nodes(nodes, given, [name for name in wanted if name not in given], model.name)
    used = {name for node in ordered for name in (*node.input, *captured_names(node))} | set(model.outputs)
    counters = tuple(Counter(inputs[name], _choices(inputs[name], own)) for name, own in read.items())
    declared = [item for item in model.declared if item.name in used or item.name not in read]
    new = replace(model, declared=declared, nodes=ordered, sized=frozenset(map(_copied, read)))
    needs = [replace(need, value=renamed[need.value]) for need in needs]
    return AppendingModel(new, caches, tuple(needs), counters)


def _reading(node: onnx.NodeProto, renamed: Mapping[str, str], needs: Sequence[Need]) -> onnx.NodeProto:
    """Return a node that reads the copies of counts, if it is one that needs them."""
    label = node_label(node)
    places = [i for i, name in enumerate(node.input) if any(n.value == name and n.label == label for n in needs)]
    if not places:
        return node
    own = _copy(node)
    for i in places:
        own.input[i] = renamed[node.input[i]]
    return own


def _choices(item: onnx.ValueInfoProto, direct: set[str]) -> tuple[str, ...]:
    """Return what an input may have; `direct`: what nodes that read it as it is need, "" for others."""
    if known := direct - {""}:
        return tuple(sorted(known))
    return COUNTS if len(item.type.tensor_type.shape.dim) < 2 else (ONES, PLACES, *COUNTS)


def _is_integer(item: onnx.ValueInfoProto) -> bool:
    dtype = dtype_of(item.type.tensor_type.elem_type)
    return dtype is not None and dtype.numpy.kind in "iu"


def _copied(name: str) -> str:
    return f"{name}{COPY}" if name else ""


def _copy(item: AnyProto) -> AnyProto:
    own = type(item)()
    own.CopyFrom(item)
    return own


def _dim(item: onnx.ValueInfoProto, axis: int) -> onnx.TensorShapeProto.Dimension:
    return item.type.tensor_type.shape.dim[axis]


def _names(item: onnx.ValueInfoProto) -> list[str]:
    return [item.name, *(dim.dim_param for dim in item.type.tensor_type.shape.dim if dim.dim_param)]
