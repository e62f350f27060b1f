"""Replaces an unrolled loop over experts by nodes that gather the weights of each row's expert.

Some exporters unroll the loop of a mixture of experts: each expert selects its rows with `NonZero` of a mask, computes
them, and adds them to a sum (`ScatterND`, `ScatterElements`). The experts differ in their constants only, and their
rows together are all positions of the index that chooses experts. So one expert's nodes compute the same result if
they process all positions and multiply by weights that the index gathers. Their sizes then do not depend on data.

These conditions are checked: the index comes from `TopK` over as many elements as there are experts; the nodes of all
experts are the same; each value has an axis of rows, along which no node mixes rows (`korch.frontend.rows`); each
element of the sum gets the same number of rows. Otherwise the nodes are left unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from korch.frontend.attributes import NodeAttributes
from korch.frontend.names import captured_names
from korch.frontend.propagate import Host, Propagation
from korch.frontend.rows import row_axes
from korch.primitive.op import Array
from korch.primitive.types import ValueType

SCATTERS = ("ScatterND", "ScatterElements")
MOVES = ("Cast", "Identity")


@dataclass(frozen=True)
class _Expert:
    """One expert's nodes."""

    start: onnx.NodeProto  # the `NonZero`
    nodes: tuple[onnx.NodeProto, ...]  # the nodes that depend on it, without `end`
    end: onnx.NodeProto  # the scatter that writes this expert's rows
    base: str  # the value to which the rows are added
    # the node that computes the sum: the scatter, or the addition of the scattered rows and `base`
    result: onnx.NodeProto
    numbers: str  # the value with the numbers of the chosen experts
    order: tuple[int, ...]  # the axes of `numbers`, in the order in which the mask has them
    number: int  # the number of this expert in `numbers`


@dataclass
class _Model:
    """All nodes, and what is known of the values that do not depend on rows."""

    nodes: Sequence[onnx.NodeProto]
    known: Propagation
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.makers = {name: node for node in self.nodes for name in node.output}

    def constant(self, name: str) -> Array | None:
        return self.known.constants.get(name)

    def source(self, name: str) -> tuple[str, onnx.NodeProto | None]:
        """Return the value that a value is a cast or copy of, with the node that computes it."""
        while (maker := self.makers.get(name)) is not None and maker.op_type in MOVES:
            name = maker.input[0]
        return name, maker

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return [node for node in self.nodes if name in node.input]

    def same(self, a: str, b: str) -> bool:
        """Return whether two values are equal for all inputs."""
        one, other = self.constant(a), self.constant(b)
        if a == b or one is not None or other is not None:
            return a == b or (one is not None and other is not None and _equal(one, other))
        first, second = self.makers.get(a), self.makers.get(b)
        if first is None or second is None or not _alike(first, second):
            return False
        is_same_output = list(first.output).index(a) == list(second.output).index(b)
        return is_same_output and all(self.same(x, y) for x, y in zip(first.input, second.input, strict=True))


def gather_experts(
    name: str,
    opsets: Mapping[str, int],
    types: Mapping[str, ValueType],
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Array],
    outputs: Sequence[str],
) -> list[onnx.NodeProto]:
    """Return the nodes without unrolled loops over experts; constants that they need are added to `constants`.

    `constants`: the constants by name.
    """
    if not any(node.op_type in SCATTERS for node in nodes) or not any(node.op_type == "NonZero" for node in nodes):
        return list(nodes)
    known = Propagation(name, opsets, dict(types), dict(constants), (), Host())
    found, walked = list(nodes), dict[int, onnx.NodeProto]()
    kept = {*outputs, *(inner for node in nodes for inner in captured_names(node))}
    while True:
        early = [node for node in _early(found) if id(node) not in walked]
        known.walk(early)
        walked |= {id(node): node for node in early}
        before, model = len(found), _Model(found, known)
        for group in _groups(model):
            own, last = [n for e in group for n in (e.start, *e.nodes, e.end, e.result)], group[-1].result
            own += _between(model, own, group)
            shown = kept.intersection(name for node in own if node is not last for name in node.output)
            made = None if shown else _gathered(model, group, constants)
            if made is not None:
                dropped = set(map(id, own))
                found = [
                    n for node in found for n in (made if node is last else () if id(node) in dropped else (node,))
                ]
        if len(found) == before:
            return found


def _between(model: _Model, own: Sequence[onnx.NodeProto], group: Sequence[_Expert]) -> list[onnx.NodeProto]:
    """Return the nodes outside of the group that depend on a partial sum, after inferring what is static of them."""
    members, found = set(map(id, own)), []
    names = {expert.result.output[0] for expert in group[:-1]}
    for name in names & {*model.makers} if group[0].base in model.known.types else ():
        model.known.types.setdefault(name, model.known.types[group[0].base])
    for node in model.nodes:
        if id(node) not in members and names.intersection(node.input):
            found.append(node)
            names.update(node.output)
    model.known.walk(found)
    return found


def _early(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes that do not depend on a `NonZero`, whose size depends on data."""
    late: set[str] = set()
    for node in nodes:
        if (node.op_type == "NonZero" and not node.domain) or late.intersection((*node.input, *captured_names(node))):
            late.update(node.output)
    return [node for node in nodes if late.isdisjoint(node.output)]


def _groups(model: _Model) -> Iterator[list[_Expert]]:
    """Yield the experts that add to one sum, in order."""
    group: list[_Expert] = []
    for start in model.nodes:
        is_known = start.op_type == "NonZero" and start.input[0] in model.known.types
        expert = _expert(model, start) if is_known else None
        if expert is None:
            continue
        if group and expert.base != group[-1].result.output[0]:
            yield group
            group = []
        group.append(expert)
    if group:
        yield group


def _expert(model: _Model, start: onnx.NodeProto) -> _Expert | None:
    chosen = _choice(model, start.input[0])
    own, nodes, ends = set(start.output), [], []
    for node in model.nodes:
        if own.isdisjoint(node.input):
            continue
        if node.op_type in SCATTERS and node.input[0] not in own:
            ends.append(node)
        else:
            nodes.append(node)
            own.update(node.output)
    total = _total(model, ends[0]) if len(ends) == 1 else None
    if chosen is None or total is None:
        return None
    (numbers, order, number), (base, result) = chosen, total
    return _Expert(start, tuple(nodes), ends[0], base, result, numbers, order, number)


def _total(model: _Model, end: onnx.NodeProto) -> tuple[str, onnx.NodeProto] | None:
    """Return the value that a scatter adds to, and the node that computes the sum.

    A scatter into zeros counts as an addition, because each row occurs at most once per expert.
    """
    if NodeAttributes(end).get("reduction", "none") == "add":
        return str(end.input[0]), end
    data, readers = model.constant(end.input[0]), model.readers(end.output[0])
    is_plain = NodeAttributes(end).get("reduction", "none") == "none"
    if not is_plain or data is None or data.any() or len(readers) != 1 or readers[0].op_type != "Add":
        return None
    if readers[0].input[0] == readers[0].input[1]:
        return None
    (base,) = (name for name in readers[0].input if name != end.output[0])
    return str(base), readers[0]


def _choice(model: _Model, mask: str) -> tuple[str, tuple[int, ...], int] | None:
    """Return how a mask chooses rows: the index, the order of the index's axes in the mask, and the wanted number."""
    _, maker = model.source(mask)
    if maker is not None and maker.op_type == "Equal":
        for numbers, wanted in (maker.input, maker.input[::-1]):
            array = model.constant(wanted)
            if array is not None and array.size == 1 and numbers in model.known.types:
                return numbers, tuple(range(model.known.types[numbers].rank)), int(array.reshape(-1)[0])
    if maker is None or maker.op_type != "Gather":
        return None
    place = model.constant(maker.input[1])
    whole, turned = model.source(maker.input[0])
    if place is None or place.ndim or whole not in model.known.types:
        return None
    rank = model.known.types[whole].rank
    perm, axis = tuple(range(rank)), NodeAttributes(maker).integer("axis", 0) % rank
    if turned is not None and turned.op_type == "Transpose":
        perm = NodeAttributes(turned).integers("perm", perm[::-1])
        whole, turned = model.source(turned.input[0])
    found = None if turned is None or perm[axis] != rank - 1 else _classes(model, turned)
    if found is None:
        return None
    numbers, classes = found
    if numbers not in model.known.types or model.known.types[numbers].rank != rank - 1 or not place < len(classes):
        return None
    return numbers, tuple(q for q in perm if q != rank - 1), int(classes[int(place)])


def _classes(model: _Model, node: onnx.NodeProto) -> tuple[str, Array] | None:
    """Return the index and the numbers of the classes if a node compares an index with each class on a last axis."""
    if node.op_type == "OneHot":
        depth, values = model.constant(node.input[1]), model.constant(node.input[2])
        is_mask = values is not None and values.tolist() == [0, 1] and NodeAttributes(node).get("axis", -1) == -1
        return (node.input[0], np.arange(int(depth.reshape(-1)[0]))) if is_mask and depth is not None else None
    if node.op_type != "Equal":
        return None
    for wide, classes in (node.input, node.input[::-1]):
        array, maker = model.constant(classes), model.makers.get(wide)
        if array is None or maker is None or maker.op_type != "Unsqueeze" or wide not in model.known.types:
            continue
        type_ = model.known.types[wide]
        if array.shape == (array.size,) and type_.shape[-1:] == (1,):
            return maker.input[0], array
    return None


def _gathered(model: _Model, group: Sequence[_Expert], constants: dict[str, Array]) -> list[onnx.NodeProto] | None:
    """Return nodes that compute all experts of a sum; None if a condition does not hold."""
    first, count = group[0], len(group)
    same = all((e.numbers, e.order) == (first.numbers, first.order) for e in group)
    if count < 2 or not same or sorted(e.number for e in group) != list(range(count)):
        return None
    numbers, top = model.source(first.numbers)
    if top is None or top.op_type != "TopK" or numbers != top.output[1] or top.input[0] not in model.known.types:
        return None
    from_ = model.known.types[top.input[0]]
    if from_.shape[NodeAttributes(top).integer("axis", -1)] != count:
        return None
    sums = [model.known.types.get(name) for e in group for name in (e.base, e.end.input[0])]
    if sums[0] is None or any(type_ != sums[0] for type_ in sums):
        return None
    ordered = sorted(group, key=lambda e: e.number)
    differing = _differing(model, ordered, first)
    if differing is None:
        return None
    shape = model.known.types[first.numbers].shape
    places = [shape[q] for q in first.order]
    rows = int(np.prod(places))
    grid = np.indices(places).reshape(len(places), rows).astype(np.int64)
    known = model.known
    known.set_constant(first.start.output[0], grid)
    known.walk((*first.nodes, first.end))
    axes = row_axes(first.start.output[0], (*first.nodes, first.end), known, rows)
    if axes is None:
        return None
    constants[first.start.output[0]] = grid
    writer = _ExpertWriter(first, constants, differing, axes, known)
    return writer.run(group[-1].result.output[0], rows)


def _differing(model: _Model, ordered: Sequence[_Expert], first: _Expert) -> dict[tuple[int, int], list[Array]] | None:
    """Return the constants that differ between experts, by node and input; None if anything else differs."""
    found: dict[tuple[int, int], list[Array]] = {}
    template = (*first.nodes, first.end)
    for expert in ordered:
        nodes = (*expert.nodes, expert.end)
        if len(nodes) != len(template):
            return None
        names = {expert.start.output[0]: first.start.output[0]}
        for i, (node, wanted) in enumerate(zip(nodes, template, strict=True)):
            if not _alike(node, wanted):
                return None
            for j, (a, b) in enumerate(zip(node.input, wanted.input, strict=True)):
                one, other = model.constant(a), model.constant(b)
                if node is expert.end and j == 0:
                    continue
                if one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype:
                    found.setdefault((i, j), []).append(one)
                elif names.get(a, "") != b and not model.same(a, b):
                    return None
            names |= dict(zip(node.output, wanted.output, strict=True))
    return {k: arrays for k, arrays in found.items() if not all(_equal(a, arrays[0]) for a in arrays)}


def _alike(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    is_same = (a.op_type, a.domain, len(a.input), len(a.output)) == (b.op_type, b.domain, len(b.input), len(b.output))
    return is_same and sorted(x.SerializeToString() for x in a.attribute) == sorted(
        x.SerializeToString() for x in b.attribute
    )


def _equal(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a is b or a.tobytes() == b.tobytes())


class _RefusedError(Exception):
    """A node can't use weights that an index gathers."""


@dataclass
class _ExpertWriter:
    """Writes the nodes of one expert with gathered weights."""

    expert: _Expert
    constants: dict[str, Array]
    differing: dict[tuple[int, int], list[Array]]
    axes: Mapping[str, int]
    known: Propagation
    made: list[onnx.NodeProto] = field(default_factory=list)

    def run(self, output: str, rows: int) -> list[onnx.NodeProto] | None:
        """Return the nodes; None if a node can't use gathered weights."""
        numbers = self.add("Transpose", self.expert.numbers, perm=list(self.expert.order))
        self.index = self.add("Reshape", numbers, self.constant(np.array([-1], np.int64)))
        try:
            for i, node in enumerate(self.expert.nodes):
                stacks = {j: np.stack(arrays) for (k, j), arrays in self.differing.items() if k == i}
                if stacks:
                    self.weighted(node, stacks)
                else:
                    self.made.append(node)
            if any(k == len(self.expert.nodes) for k, _ in self.differing):
                return None
            self.sum(output, rows)
        except _RefusedError:
            return None
        return self.made

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its result."""
        name = output or f"{self.expert.start.output[0]}:gathered{len(self.made)}"
        self.made.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, array: Array) -> str:
        name = f"{self.expert.start.output[0]}:constant{len(self.made)}_{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array)
        self.known.set_constant(name, self.constants[name])
        return name

    def gathered(self, stack: Array) -> str:
        return self.add("Gather", self.constant(stack), self.index, axis=0)

    def weighted(self, node: onnx.NodeProto, stacks: Mapping[int, Array]) -> None:
        """Add a matrix product or an elementwise operation, with constants that are gathered for each row."""
        attributes, (left, *_) = NodeAttributes(node), node.input
        is_plain = all(attributes.get(key, 1.0) == 1.0 for key in ("alpha", "beta")) and not attributes.get("transA")
        one = self.constant(np.array([1], np.int64))
        if node.op_type in ("MatMul", "Gemm") and 0 not in stacks and is_plain:
            if (
                self.known.types[left].rank != 2
                or self.axes.get(left) != 0
                or self.known.types[node.input[1]].rank != 2
            ):
                raise _RefusedError
            shared = self.known.constants.get(node.input[1])
            if shared is None:
                raise _RefusedError
            matrices = stacks[1] if 1 in stacks else np.stack([shared] * self.count)
            turned = matrices.transpose(0, 2, 1) if attributes.get("transB") else matrices
            product = self.add("MatMul", self.add("Unsqueeze", left, one), self.gathered(turned))
            has_bias = len(node.input) > 2
            product = self.add("Squeeze", product, one, output="" if has_bias else node.output[0])
            if has_bias:
                bias = self.gathered(stacks[2]) if 2 in stacks and stacks[2].ndim == 2 else node.input[2]
                self.add("Add", product, bias, output=node.output[0])
            return
        (place,) = stacks if len(stacks) == 1 else (-1,)
        other = node.input[1 - place] if place in (0, 1) and len(node.input) == 2 else ""
        fits = self.axes.get(other) == 0 and self.known.types[other].rank == 2 and stacks[place].ndim == 2
        if node.op_type not in ("Add", "Mul", "Sub", "Div") or not fits:
            raise _RefusedError
        own = self.gathered(stacks[place])
        self.add(node.op_type, *((own, other) if place == 0 else (other, own)), output=node.output[0])

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(next(iter(self.differing.values())))

    def sum(self, output: str, rows: int) -> None:
        """Sum the rows that go to the same place of the result, and add them to the first expert's base."""
        data, (_, places, updates) = self.expert.base, self.expert.end.input
        index, type_ = self.known.constants.get(places), self.known.types[updates]
        axis = NodeAttributes(self.expert.end).integer("axis", 0)
        if index is None or type_.rank != 2 or self.axes.get(updates) != 0 or axis:
            raise _RefusedError
        to = index.reshape(rows, -1)
        size = self.known.types[self.expert.end.input[0]].shape[0]
        is_scattered = self.expert.end.op_type == "ScatterElements"
        is_whole = to.shape[1] == (type_.shape[1] if is_scattered else 1) and (to == to[:, :1]).all()
        each, rest = divmod(rows, max(size, 1))
        if rest or not is_whole or (np.bincount(to[:, 0], minlength=size) != each).any():
            raise _RefusedError
        order = np.argsort(to[:, 0], kind="stable")
        by_slot = np.arange(rows).reshape(each, size)
        if (order == np.arange(rows)).all():
            shape, reduced = [size, each, type_.shape[1]], 1
        elif (order == by_slot.T.reshape(-1)).all():
            shape, reduced = [each, size, type_.shape[1]], 0
        else:
            raise _RefusedError
        wide = self.add("Reshape", updates, self.constant(np.array(shape, np.int64)))
        total = self.add("ReduceSum", wide, self.constant(np.array([reduced], np.int64)), keepdims=0)
        self.add("Add", data, total, output=output)
