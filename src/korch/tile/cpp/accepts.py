"""Checks that the C++ printer supports a tile program."""

from __future__ import annotations

from collections.abc import Collection

from korch.tile.analysis.components import split_of
from korch.tile.analysis.panels import panels
from korch.tile.analysis.sums import is_by_lanes, kept_guards, leaves_out, sides_of
from korch.tile.cpp.split_operands import require_components
from korch.tile.ir.program import Contract, Level, Load, Product, TileProgram, refused

PRODUCTS = (Product.F32, Product.F16, Product.BF16, Product.SPLIT)
"""The supported products of floats: operands are widened or split, sums are float32."""


def require_contractions(program: TileProgram, known: Collection[str]) -> None:
    """Raise an error if the C++ printer does not support a program.

    Args:
        program: the program.
        known: the names of the parameters that are computed from the sizes.

    Raises:
        InvalidGraphError: it has other parameters, or layouts or contractions that are not supported.
    """
    for parameter in program.parameters:
        if parameter.name not in known:
            raise refused(f"{parameter.name} is known at run time only", "Bind the parameters first")
    for buffer in program.buffers:
        layout = panels(buffer)
        is_panel = buffer.level is not Level.OUTPUT and layout is not None
        if buffer.layout and not (is_panel and len(buffer.layout) == (2 if split_of(buffer) else 1)):
            raise refused(f"the layout of buffer {buffer.name} can't be printed")
    for stage in program.stages:
        require_components(program, stage)
        for _, step in stage.leaves:
            if isinstance(step, Contract):
                _require_contraction(step)
            elif any({step.vector, step.across} & guard.expr.variables for guard in step.where):
                raise refused("passes that leave elements of a vector out can't be printed")
            elif any(panels(program.buffer(op.buffer)) for op in step.ops if isinstance(op, Load)):
                raise refused("passes that read panels can't be printed")


def _require_contraction(step: Contract) -> None:
    if step.product not in PRODUCTS:
        raise refused(f"contractions by {step.product.value} can't be printed")
    if step.factor is not None and (step.product is not Product.SPLIT or step.rescale is not None):
        raise refused("only contractions of components have a factor of products")
    is_of_windows = leaves_out(step) or is_by_lanes(step)
    if {*step.where} - {*kept_guards(step)} and not is_of_windows:
        raise refused("contractions that leave terms out can be printed for convolutions of floats only")
    sides_of(step)
