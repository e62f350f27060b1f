"""What the printers of products share: launches, loads of arguments, stores of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from korch.candidate.candidate import Group, Offer
from korch.cuda.kernel import CudaKernel, kernel_of
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.provider.triton.fused import ports
from korch.schedule.contraction import Fusion
from korch.tile.emit import Index
from korch.tile.index import Expr, Ranges
from korch.tile.program import Load, TileOp
from korch.tile.triton_launch import PrintedProgram
from korch.tile.triton_text import STORED, Coordinates, Text, axes_of


class KernelPrinter:
    """Prints the launches of one kernel around some linear primitives.

    Attributes:
        printed: the launches so far.
        precision: how float32 products round their factors, as Triton names it.
    """

    def __init__(self, group: Group, offer: Offer, target: CudaTarget, *roots: Primitive) -> None:
        self.body = group.body
        self.target = target
        self.fusion = Fusion(group, (offer.inputs, offer.outputs), *roots)
        self.ports = ports(group)
        self.dtype = group.body.types[roots[0].output].dtype
        self.precision = "tf32" if target.allow_tf32 else "ieee"
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        self.comment = f"{group.text}layouts {layouts}\nvariant {offer.variant}"
        self.printed = PrintedProgram()

    @property
    def scratch(self) -> dict[str, tuple[DType, int]]:
        """The memory that launches use beside inputs and outputs; a launch adds what it needs."""
        return self.printed.scratch

    def kernel(self) -> CudaKernel:
        """Return what has been printed."""
        return kernel_of(self.printed, *self.ports)

    def finish(self, text: Text, grid: int, warps: int, stages: int) -> None:
        """Add the launch of a text."""
        self.printed.add(text, self.comment, grid, warps, stages)

    def load(
        self,
        text: Text,
        name: str,
        value: int,
        index: Index,
        ranges: Ranges,
        at: Coordinates,
        masks: Mapping[int, str],
        shape: str,
    ) -> None:
        """Write the load of a tile of an argument, with what is computed on the way.

        Args:
            text: what is written.
            name: the variable that takes the tile.
            value: the argument.
            index: the index of its element.
            ranges: of the variables.
            at: their spelling.
            masks: conditions per axis of the tile; elsewhere the tile is 0.
            shape: the tile's.
        """
        emitter = self.fusion.emitter(ranges)
        element = self.fusion.argument(emitter, value, index)
        values: dict[str, str] = {}
        text.ops(emitter.ops, at, masks, values, {})
        found = f"tl.broadcast_to({values[element]}, {shape})"
        is_loaded = len(emitter.ops) == 1 and isinstance(emitter.ops[0], Load)
        if masks and not (is_loaded and _covers(masks, at, emitter.ops[0])):
            found = f"tl.where({' & '.join(masks.values())}, {found}, 0.0)"
        text.line(f"{name} = {found}.to({STORED[self.body.types[value].dtype]})")

    def write(
        self,
        text: Text,
        ops: Sequence[TileOp],
        stores: Sequence[tuple[str, DType, Expr, str]],
        given: Mapping[str, tuple[str, DType]],
        at: Coordinates,
        masks: Mapping[int, str],
        shape: str,
    ) -> None:
        """Write what follows a product, and the stores.

        Args:
            text: what is written.
            ops: the operations.
            stores: buffer, element type, place and name of each output's element.
            given: variables and types of what the operations start from.
            at: the spelling of variables.
            masks: conditions per axis of the tile.
            shape: the tile's.
        """
        values = {name: variable for name, (variable, _) in given.items()}
        types = {name: dtype for name, (_, dtype) in given.items()}
        text.ops(ops, at, masks, values, types)
        for buffer, dtype, place, name in stores:
            text.store(buffer, dtype, place, values[name], at, masks, shape)


def _covers(masks: Mapping[int, str], at: Coordinates, op: TileOp) -> bool:
    """Return whether a load was masked along every axis that has a mask."""
    if not isinstance(op, Load):
        return False
    guards = (axes_of(guard.expr, at) for guard in op.guards)
    return set(masks) <= axes_of(op.index, at).union(*guards)
