"""Group around a product by stored weights -> its offer and its kernel."""

from __future__ import annotations

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType
from korch.provider.gemm.vectors import require_rows
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.contraction import FLOATS, NotFusedError, extent, root_of
from korch.schedule.stored import Stored, blocking_of, strips
from korch.target import Target
from korch.tile.cpp_steps import FEW_REGISTERS, REGISTERS
from korch.tile.program import TileProgram
from korch.tile.staging import Machine

STORED = "matmul_stored"


def offer_stored(group: Group, target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer the product with its weights in strips of columns."""
    root = root_of(group, STORED)
    if isinstance(root, Refusal):
        return root
    stored = set(root.inputs[1:])
    around = [type_ for value, type_ in enumerate(group.body.types) if value not in stored]
    if group.body.types[root.inputs[0]].dtype is not DType.F32 or any(t.dtype not in FLOATS for t in around):
        return Refusal("the elements are not floats of at most 32 bits")
    places = [group.position.get(value) for value in root.inputs[1:]]
    if any(place is None or place not in group.constant_inputs for place in places):
        return Refusal("the weights are no constants")
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    try:
        inputs, _ = _program_of(group, root, target)
    except NotFusedError as error:
        return Refusal(str(error))
    outputs = tuple(Layout.plain(type_.rank) for type_ in group.output_types)
    return (Offer(inputs, outputs),)


def build_stored(group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
    """Print the kernel of an offer."""
    root = root_of(group, STORED)
    if isinstance(root, Refusal):
        return root
    return kernel_of(_program_of(group, root, target)[1], group, offer, target)


def _program_of(group: Group, root: Primitive, target: Target) -> tuple[tuple[Layout, ...], TileProgram]:
    """Return the layouts of the inputs, and the program."""
    if not isinstance(root.attributes, StoredAttributes):
        raise AssertionError(f"{root.op} is no product by stored weights")
    *lead, terms = group.body.types[root.inputs[0]].shape
    rows = extent(tuple(("", n) for n in lead))
    registers = REGISTERS.get(target.lanes, FEW_REGISTERS)
    blocking = blocking_of(root.attributes, rows, terms, target.lanes, registers)
    stored = {group.position[value] for value in root.inputs[1:]}
    inputs = tuple(
        strips(blocking.strip) if i in stored else Layout.plain(type_.rank) for i, type_ in enumerate(group.input_types)
    )
    outputs = tuple(Layout.plain(type_.rank) for type_ in group.output_types)
    program = Stored(group, root, (inputs, outputs), Machine(target.lanes, target.threads)).program(blocking)
    require_rows(program, target.lanes)
    return inputs, program
