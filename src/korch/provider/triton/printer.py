"""What the printers of products share: launches, loads of arguments, stores of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from korch.candidate.candidate import Group, Offer
from korch.cuda.kernel import CudaKernel, make_launch
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.provider.triton.contraction import Fusion
from korch.provider.triton.fused import ports
from korch.tile.emit import Index
from korch.tile.index import Expr, Ranges
from korch.tile.program import Load, TileOp
from korch.tile.triton_text import STORED, Coordinates, Text


class KernelPrinter:
    """Prints the launches of one kernel around some linear primitives.

    Attributes:
        launches: source, buffers, programs, warps and stages of each.
        scratch: memory that the launches use beside inputs and outputs.
        tables: constant tables.
    """

    def __init__(self, group: Group, offer: Offer, target: CudaTarget, *roots: Primitive) -> None:
        self.body = group.body
        self.target = target
        self.fusion = Fusion(group, offer, *roots)
        inputs, outputs = ports(group)
        self.types: dict[str, DType] = dict((*inputs, *outputs))
        self.dtype = group.body.types[roots[0].output].dtype
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        self.comment = f"{group.text}layouts {layouts}\nvariant {offer.variant}"
        self.launches: list[tuple[str, tuple[str, ...], int, int, int]] = []
        self.scratch: dict[str, tuple[DType, int]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}

    def kernel(self) -> CudaKernel:
        """Return what has been printed."""
        types = self.types | {name: dtype for name, (dtype, _) in self.scratch.items()}
        types |= dict.fromkeys(self.tables, DType.I32)
        number = {name: i for i, name in enumerate(types)}
        steps = tuple(
            make_launch(source, buffers, number, types, grid, warps, stages)
            for source, buffers, grid, warps, stages in self.launches
        )
        return CudaKernel(steps, tuple(self.scratch.values()), tuple(self.tables.values()))

    def finish(self, text: Text, grid: int, warps: int, stages: int) -> None:
        """Add the launch of a text."""
        renamed = {}
        for table, name in text.tables.items():
            known = next((n for n, t in self.tables.items() if t == table), None)
            renamed[name] = known or f"c{len(self.tables)}"
            self.tables[renamed[name]] = table
        names = tuple(text.arguments)
        head = "".join(f"    # {line}\n" for line in self.comment.splitlines())
        parameters = ", ".join(f"p_{name}" for name in names)
        source = f"@triton.jit\ndef NAME({parameters}):\n{head}" + "\n".join(text.lines) + "\n"
        self.launches.append((source, tuple(renamed.get(n, n) for n in names), grid, warps, stages))

    def load(self, text: Text, name: str, value: int, index: Index, ranges: Ranges,
             at: Coordinates, masks: Mapping[int, str], shape: str) -> None:  # fmt: skip
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

    def write(self, text: Text, ops: Sequence[TileOp],
              stores: Sequence[tuple[str, DType, Expr, str]],
              given: Mapping[str, tuple[str, DType]], at: Coordinates, masks: Mapping[int, str],
              shape: str) -> None:  # fmt: skip
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
    exprs = (op.index, *(guard.expr for guard in op.guards))
    axes = {axis for e in exprs for name in e.variables for axis in at[name].axes}
    return set(masks) <= axes
