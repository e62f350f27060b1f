"""The view that a fission rule has of its operator, and the methods with which it adds primitives."""

from collections.abc import Mapping

from korch.frontend.attributes import NodeAttributes
from korch.frontend.operator import Operator
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array, Attributes, Category
from korch.primitive.ops import OPS
from korch.primitive.types import ValueId, ValueType
from korch.primitive.verbs import Shape, Verbs


class Context(Verbs):
    """One operator that is being split.

    Attributes:
        operator: the operator.
        builder: the primitive graph so far.
        iteration: the primitives of one iteration of a loop; None for any other operator.
    """

    def __init__(
        self,
        operator: Operator,
        builder: GraphBuilder,
        values: Mapping[str, ValueId],
        types: Mapping[str, ValueType],
        read: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(builder, operator.label)
        self.operator = operator
        self.iteration: PrimitiveGraph | None = None
        self._values, self._types, self._read = values, types, read

    @property
    def version(self) -> int:
        """The opset version of the operator."""
        return self.operator.version

    @property
    def inputs(self) -> tuple[ValueId, ...]:
        """The values of the inputs that are present."""
        return tuple(self._values[name] for name in self.operator.inputs if name)

    def input(self, position: int) -> ValueId:
        """Return the value of a required input."""
        return self._values[self.operator.inputs[position]]

    def optional(self, position: int) -> ValueId | None:
        """Return the value of an input, or None if it is omitted."""
        return self.input(position) if self.is_given(position) else None

    def is_given(self, position: int) -> bool:
        """Return whether an input is present."""
        return position < len(self.operator.inputs) and bool(self.operator.inputs[position])

    def array(self, position: int) -> Array | None:
        """Return the elements of an input that is known at build time, else None."""
        value = self.optional(position)
        constant = None if value is None else self.builder.constant_of(value)
        return None if constant is None else constant.array

    def ints(self, position: int) -> Shape | None:
        """Return the elements of a known input of integers, else None."""
        array = self.array(position)
        return None if array is None else tuple(int(n) for n in array.reshape(-1))

    @property
    def attributes(self) -> NodeAttributes:
        """The operator's attributes."""
        return self.operator.attributes

    def output_type(self, position: int = 0) -> ValueType:
        """Return the type of an output that is not omitted."""
        return self._types[self.operator.outputs[position]]

    def is_read(self, position: int) -> bool:
        """Return whether anything reads an output."""
        outputs = self.operator.outputs
        return position < len(outputs) and bool(outputs[position]) and (outputs[position] in self._read)

    def add(self, op: str, *values: ValueId, attributes: Attributes | None = None) -> ValueId:
        """Add one primitive; a linear primitive with an empty input becomes zeros."""
        if OPS[op].category is Category.LINEAR and not all(self.builder.type(value).size for value in values):
            own = attributes or OPS[op].attributes()
            return self.full(0, OPS[op].infer([self.builder.type(value) for value in values], own))
        return super().add(op, *values, attributes=attributes)


def axis_of(axis: int, rank: int) -> int:
    """Return a possibly negative axis as an index from the front."""
    return axis + rank if axis < 0 else axis
