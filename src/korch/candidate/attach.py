"""Primitive graph -> the attached primitives: those that are always in the same group as their readers.

The enumeration of groups does not add attached primitives one by one; each reader brings them along.
A broadcast or a slice costs nothing inside a kernel. In a chain of elementwise primitives, or of layout
primitives, a kernel that ends between two of them only moves the tensor one more time.
"""

from korch.primitive.component import strong_components
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.types import NARROW

MAX_READERS = 3  # elementwise primitives with more readers are not attached to them: storing their output may be faster
LAYOUT_GROWTH = 1.25  # layout primitives that enlarge a tensor by more than this factor are not attached to readers


class Attachment:
    """Decides which primitives of a graph are attached to their readers."""

    def __init__(self, graph: PrimitiveGraph, attach_chains: bool) -> None:
        """Initialize.

        `attach_chains`: whether chains are attached, too, and not only broadcasts and slices.
        """
        self.graph, self.attach_chains = graph, attach_chains
        self.outputs = {value for _, value in graph.outputs}
        self.in_cycle = _in_cycles(graph)

    def is_attached(self, p: int) -> bool:
        """Whether a primitive is attached to its readers."""
        graph, value = self.graph, self.graph.primitives[p].output
        if value in self.outputs or len(graph.producers[value]) != 1:
            return False
        readers = graph.reading(value)
        if self.costs_nothing(p):
            closed = (Category.LINEAR, Category.OPAQUE)
            return not any(reader.row.category in closed for reader in readers)
        if not self.attach_chains or not 1 <= len(readers) <= MAX_READERS:
            return False
        if p in self.in_cycle:  # attached to its reader, it could close the cycle
            return False
        category = graph.primitives[p].row.category
        before, after = graph.types[value], [graph.types[reader.output] for reader in readers]
        if any(reader.row.category is not category for reader in readers):
            return False
        if category is Category.ELEMENTWISE:
            is_whole = all(type_.shape == before.shape for type_ in after)
            is_whole = is_whole and not any(map(self._is_widened_for_linear, readers))
            return is_whole and (self._is_narrowed(p) or not self._continues_linear(p))
        if category is not Category.LAYOUT or len(readers) > 1:
            return False
        return after[0].size <= LAYOUT_GROWTH * before.size

    def costs_nothing(self, p: int) -> bool:
        """Whether a primitive only changes the positions at which a kernel reads elements."""
        return self.graph.primitives[p].op in ("broadcast", "slice")

    def _is_widened_for_linear(self, reader: Primitive) -> bool:
        """Whether a primitive widens numbers for a linear primitive, whose kernels prefer to read the narrow ones."""
        linear = (r.row.category is Category.LINEAR for r in self.graph.reading(reader.output))
        return self.graph.is_widening(reader) and any(linear)

    def _is_narrowed(self, p: int) -> bool:
        """Whether a chain of elementwise primitives with one reader each casts the value to smaller integers."""
        graph, value = self.graph, self.graph.primitives[p].output
        wide = graph.types[value].dtype.size_bytes
        while len(readers := graph.reading(value)) == 1 and readers[0].row.category is Category.ELEMENTWISE:
            p, value = graph.consumers[value][0], readers[0].output
            if self.is_byte_cast(p) and graph.types[value].dtype.size_bytes < wide:
                return True
        return False

    def is_byte_cast(self, p: int) -> bool:
        """Whether a primitive is a cast to quantized values."""
        primitive = self.graph.primitives[p]
        return primitive.op == "cast" and self.graph.types[primitive.output].dtype in NARROW

    def _continues_linear(self, p: int) -> bool:
        """Whether only elementwise primitives, and no cast to bytes, are between a linear primitive and this one."""
        seen, stack = {p}, [p]
        while stack:
            for q in self.makers(stack.pop()):
                category = self.graph.primitives[q].row.category
                if category is Category.LINEAR:
                    return True
                is_link = category is Category.ELEMENTWISE and self._is_attached_alone(q) and not self.is_byte_cast(q)
                if is_link and q not in seen:
                    seen.add(q)
                    stack.append(q)
        return False

    def makers(self, p: int) -> list[int]:
        """Return the primitives that compute the inputs of a primitive, including all alternatives."""
        inputs = self.graph.primitives[p].inputs
        return [q for value in inputs for q in self.graph.producers[value]]

    def _is_attached_alone(self, p: int) -> bool:
        """Whether the value of a primitive has one producer and one reader, so that both form a chain."""
        value = self.graph.primitives[p].output
        return len(self.graph.producers[value]) == len(self.graph.consumers[value]) == 1


def _in_cycles(graph: PrimitiveGraph) -> set[int]:
    """Return the primitives that depend on themselves through alternatives."""
    feeds = {
        p: [q for value in primitive.inputs for q in graph.producers[value]]
        for p, primitive in enumerate(graph.primitives)
    }
    return {p for part in strong_components(feeds) if len(part) > 1 or part[0] in feeds[part[0]] for p in part}
