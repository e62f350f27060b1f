"""Groups, offers and candidates.

A *group* is a convex set of primitives with its inputs and outputs, stored as a separate small graph in
canonical numbering. Equal groups of one model, or of two models, have equal keys, so they are lowered,
compiled and measured once. An *offer* is a provider's answer for a group: one way to run it, with the layouts
that it reads and writes. A *candidate* is a group with one offer: a kernel that the search may choose.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from korch.candidate.layout import Layout
from korch.primitive.body import number_body
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import SliceAttributes, TakeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.text import format_graph
from korch.primitive.types import ValueType
from korch.ranges.served import Served

OPAQUE_ELEMENTS = 64
"""Constants of at most this many elements are part of an opaque operator's body."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a provider does not run a group, or why a rule does not apply."""

    reason: str


@dataclass(frozen=True)
class Group:
    """A convex set of primitives.

    Attributes:
        primitives: their ids in the model's graph, sorted; none for a change of layout.
        inputs: the values that it reads. Uniform constants are not inputs, they are part of the body.
            So are small constants of an opaque operator, since they may be sizes or axes.
        outputs: the values that it writes.
        constant_inputs: positions in `inputs` of values known at build time: a provider may ask
            for them in any layout.
        body: the primitives as a separate graph, with inputs named i0, i1, ... and outputs o0, o1, ....
    """

    primitives: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constant_inputs: frozenset[int]
    body: PrimitiveGraph

    @cached_property
    def text(self) -> str:
        """The canonical text form of the body, in which the constant inputs are marked."""
        marked = "".join(f"# constant i{i}\n" for i in sorted(self.constant_inputs))
        return marked + format_graph(self.body)

    @cached_property
    def key(self) -> str:
        """The hash of the text: equal for equal groups."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:20]

    @cached_property
    def input_types(self) -> tuple[ValueType, ...]:
        """The types of the inputs."""
        return tuple(self.body.types[value] for _, value in self.body.inputs)

    @cached_property
    def output_types(self) -> tuple[ValueType, ...]:
        """The types of the outputs."""
        return tuple(self.body.types[value] for _, value in self.body.outputs)

    @cached_property
    def needed_bytes(self) -> tuple[int | None, ...]:
        """Per input, the bytes that a kernel must read in any layout; None if no primitive reads the input."""
        body = self.body
        return tuple(_needed_bytes(body, value) if body.consumers[value] else None for _, value in body.inputs)

    @cached_property
    def linear_flop(self) -> int:
        """The number of operations of its linear primitives."""
        return sum(map(self.body.work_flop, self.body.linear))

    @cached_property
    def position(self) -> dict[int, int]:
        """The position of each input, by its value in the body."""
        return {value: i for i, (_, value) in enumerate(self.body.inputs)}

    def numbers_in(self, graph: PrimitiveGraph) -> list[int]:
        """Return the numbers of the body's primitives in the graph from which the group was made."""
        makers = {graph.primitives[p].output: p for p in self.primitives}
        place = dict(zip((value for _, value in self.body.outputs), self.outputs, strict=True))
        found = []
        for primitive in reversed(self.body.primitives):
            found.append(makers[place[primitive.output]])
            place |= zip(primitive.inputs, graph.primitives[found[-1]].inputs, strict=True)
        return found[::-1]

    @property
    def plain_layouts(self) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The row-major layouts of the inputs and of the outputs."""
        return (
            tuple(Layout.plain(type_.rank) for type_ in self.input_types),
            tuple(Layout.plain(type_.rank) for type_ in self.output_types),
        )

    @property
    def is_layout_change(self) -> bool:
        """Whether it computes nothing: its output is its input."""
        return not self.primitives


ALL_PAIRS = 6
"""The number of products of bfloat16 parts by which matrix units multiply two float32 numbers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One way in which a provider can run a group.

    Attributes:
        inputs: the layout in which it reads each input.
        outputs: the layout in which it writes each output.
        variant: distinguishes offers with the same layouts; its meaning is private to the provider.
        work_flop: a lower bound of the operations of this way of running the group; 0 if unknown.
        pairs: if matrix units multiply, the number of products of parts per product of two numbers (each number is
            a sum of parts); a half if the numbers are bytes; 0 if vector units multiply.
        vector_flop: if matrix units multiply, the operations that vector units do, maybe at the same time.
        is_in_place: whether no kernel runs: the inputs are consecutive parts of the output, and the kernels
            that compute them write into the output's memory.
        updates: whether the output is the memory of the first input, an input of the model that is overwritten.
        is_loop_nest: whether it runs the primitives in loops, so that its time can be estimated from
            their operations.
        guess_ns: the provider's estimate of the kernel's time in nanoseconds; 0 if it has none.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    variant: str = ""
    work_flop: int = 0
    pairs: float = 0
    vector_flop: int = 0
    is_in_place: bool = False
    updates: bool = False
    is_loop_nest: bool = False
    guess_ns: int = 0

    @property
    def layouts(self) -> str:
        """The layouts as text."""
        return f"({', '.join(map(str, self.inputs))}) -> ({', '.join(map(str, self.outputs))})"


@dataclass(frozen=True)
class Candidate:
    """A group with a provider's offer: one kernel that the search may choose.

    Attributes:
        group: what it computes.
        provider: the name of the provider.
        offer: how the provider runs the group.
        version: the provider's version.
        served: in a plan for a range of sizes, what the kernel computes, and the sizes for which it is timed.
    """

    group: Group
    provider: str
    offer: Offer
    version: str = ""
    served: Served | None = None

    @cached_property
    def key(self) -> str:
        """The hash of all that its time depends on, apart from the target."""
        return self._hash(() if self.served is None else (str(self.served),))

    @cached_property
    def kernel_key(self) -> str:
        """The hash of all that its kernel depends on: `key`, but for the sizes for which it is timed."""
        return self.key if self.served is None else self._hash((self.served.form,))

    def _hash(self, more: Sequence[str]) -> str:
        layouts = " ".join(map(str, (*self.offer.inputs, "->", *self.offer.outputs)))
        text = "|".join((self.group.key, self.provider, self.version, layouts, self.offer.variant, *more))
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @cached_property
    def input_ports(self) -> tuple[tuple[int, Layout], ...]:
        """The inputs as (value, layout), without constants."""
        return tuple(
            (value, layout)
            for i, (value, layout) in enumerate(zip(self.group.inputs, self.offer.inputs, strict=True))
            if i not in self.group.constant_inputs
        )

    @cached_property
    def output_ports(self) -> tuple[tuple[int, Layout], ...]:
        """The outputs as (value, layout)."""
        return tuple(zip(self.group.outputs, self.offer.outputs, strict=True))

    @property
    def stored(self) -> Iterator[tuple[ValueType, Layout]]:
        """The type and the layout of each input, and then of each output."""
        group, offer = self.group, self.offer
        yield from zip(group.input_types, offer.inputs, strict=True)
        yield from zip(group.output_types, offer.outputs, strict=True)

    @property
    def size_bytes(self) -> int:
        """The bytes of all its inputs and outputs; 0 for an in-place offer."""
        return 0 if self.offer.is_in_place else sum(layout.size_bytes(type_) for type_, layout in self.stored)

    @cached_property
    def read_bytes(self) -> int:
        """The bytes that it must read; if only a part of an input is needed (such as a slice), that part."""
        return sum(map(self._read_bytes_of, range(len(self.group.inputs))))

    @cached_property
    def read_constant_bytes(self) -> int:
        """Bytes of constants that it must read."""
        return sum(map(self._read_bytes_of, self.group.constant_inputs))

    def _read_bytes_of(self, i: int) -> int:
        """Return the bytes of an input that it must read."""
        body, needed_bytes = self.group.body, self.group.needed_bytes[i]
        whole = self.offer.inputs[i].size_bytes(body.types[body.inputs[i][1]])
        return whole if needed_bytes is None else min(whole, needed_bytes)

    @cached_property
    def write_bytes(self) -> int:
        """Bytes that it writes."""
        types = self.group.output_types
        return sum(layout.size_bytes(t) for layout, t in zip(self.offer.outputs, types, strict=True))

    @property
    def linear_flop(self) -> int:
        """Operations of its linear primitives."""
        return self.group.linear_flop

    def __str__(self) -> str:
        ops = " ".join(p.op for p in self.group.body.primitives) or "layout change"
        return f"{self.key[:8]} {self.provider} [{ops}] {self.offer.layouts}"


def _needed_bytes(body: PrimitiveGraph, value: int) -> int:
    """Return the bytes of the distinct elements of a value that its readers in a group need."""
    outputs = {v for _, v in body.outputs}
    if value in outputs or not body.consumers[value]:
        return body.types[value].size_bytes
    readers = (body.primitives[p] for p in body.consumers[value])
    return max(_source_bytes(body, value, reader) for reader in readers)


def _source_bytes(body: PrimitiveGraph, value: int, reader: Primitive) -> int:
    """Return the bytes of the distinct elements of a value that a primitive must read."""
    type_, attributes = body.types[value], reader.attributes
    if isinstance(attributes, SliceAttributes):
        size_bytes = math.prod(attributes.size) * type_.dtype.size_bytes
        return min(size_bytes, _needed_bytes(body, reader.output))
    if isinstance(attributes, TakeAttributes):
        size_bytes = type_.size_bytes // max(1, type_.shape[attributes.axis])
        size_bytes *= len(set(attributes.indices))
        return min(size_bytes, _needed_bytes(body, reader.output))
    if isinstance(attributes, ConvAttributes | PoolAttributes) and value == reader.inputs[0]:
        weights = body.types[reader.inputs[-1]].shape
        window = attributes.kernel if isinstance(attributes, PoolAttributes) else weights[2:]
        return math.floor(type_.size_bytes * _share_read(window, attributes))
    if reader.op == "matmul_gathered" and value == reader.inputs[1]:
        return type_.size_bytes // max(1, type_.shape[0])  # all rows may choose one matrix
    if reader.row.category is Category.OPAQUE:
        return 0  # it may look up a few rows of a table
    return type_.size_bytes


def _share_read(window: Sequence[int], attributes: ConvAttributes | PoolAttributes) -> float:
    """Return the fraction of elements that windows cover; strides may leave gaps between them."""
    return math.prod(
        len({tap * dilation % stride for tap in range(size)}) / stride
        for size, stride, dilation in zip(window, attributes.strides, attributes.dilations, strict=True)
    )


def make_group(graph: PrimitiveGraph, primitives: Iterable[int], outputs: Sequence[int]) -> Group:
    """Return the group of some primitives of a graph.

    `primitives`: ids of primitives, with at most one alternative per value and without cycles. `outputs`: the values to
    write, each computed by one of the primitives.
    """
    chosen = tuple(sorted(primitives))
    rows = [graph.primitives[p] for p in chosen]
    weights = {v for p in rows if p.row.category is Category.LINEAR for v in p.inputs}
    is_opaque = all(p.op == "opaque" for p in rows)

    def is_inside(value: int) -> bool:
        """Whether a constant is part of the body; operands of linear primitives never are."""
        constant = graph.constants[value]
        return value not in weights and (constant.is_uniform or (is_opaque and constant.array.size <= OPAQUE_ELEMENTS))

    body, values = number_body(graph, chosen, outputs, is_inside)
    inputs = tuple(values[value] for _, value in body.inputs)
    return Group(
        primitives=chosen,
        inputs=inputs,
        outputs=tuple(outputs),
        constant_inputs=frozenset(i for i, v in enumerate(inputs) if v in graph.constants),
        body=replace(body, origins=()),
    )


def make_layout_change(graph: PrimitiveGraph, value: int) -> Group:
    """Return the group that reads a value and writes the same value."""
    body = PrimitiveGraph((graph.types[value],), (), (("i0", 0),), (("o0", 0),))
    return Group((), (value,), (value,), frozenset(), body)
