"""How a kernel serves the sizes of a range: the elements that it computes, and the ends of its reductions."""

from collections.abc import Mapping
from dataclasses import dataclass

from korch.primitive.graph import PrimitiveGraph
from korch.ranges.form import Extent, Sizes
from korch.ranges.needed import Ends, Need


@dataclass(frozen=True, slots=True)
class Served:
    """How a kernel serves the sizes of a range, and the sizes for which it is timed."""

    needs: tuple[Need, ...]  # the elements of each output that are needed
    ends: Mapping[int, Ends]  # where reductions end, by the primitive's number in the group
    sizes: Sizes  # the size of each dimension
    trips: Extent | None = None  # how often a loop is repeated, if the kernel is one and it depends on the size

    def __str__(self) -> str:
        repeated = "" if self.trips is None else f" {self.trips} times"
        return f"{self.form} at {self.sizes}{repeated}"

    @property
    def form(self) -> str:
        """Everything on which the kernel depends: all but the sizes for which it is timed."""
        parts = [f"{axis}:{sorted(map(str, extents))}" for need in self.needs for axis, extents in sorted(need.items())]
        parts += [f"{p}.{axis} to {extent}" for p, ends in self.ends.items() for axis, extent in ends.items()]
        return " ".join(parts)

    def share(self, body: PrimitiveGraph) -> float:
        """Return a lower bound of the fraction of the elements that a kernel computes, or reads for one result."""
        least, ended = 1.0, 1.0
        for need, (_, value) in zip(self.needs, body.outputs, strict=True):
            share = 1.0
            for axis, extents in need.items():
                most = max(1, body.types[value].shape[axis])
                share *= min(1.0, max(extent.at(self.sizes) for extent in extents) / most)
            least = min(least, share)
        for p, ends in self.ends.items():
            shape = body.types[body.primitives[p].inputs[0]].shape
            ended = min(ended, *(extent.at(self.sizes) / max(1, shape[axis]) for axis, extent in ends.items()))
        return least * ended
