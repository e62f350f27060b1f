"""An artifact with several plans and the option --shape -> one plan, or the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from korch.errors import OptionError
from korch.runtime.runnable import PlanExecutable, Runnable, TensorInfo

if TYPE_CHECKING:
    from korch.runtime.ranged import RangedExecutable
    from korch.runtime.shaped import ShapedExecutable
    from korch.runtime.stateful import StatefulExecutable

Shapes = Mapping[str, Sequence[int]]


def inputs_at(executable: Runnable, shapes: Shapes) -> list[TensorInfo]:
    """Return descriptions of inputs with fixed sizes.

    `shapes`: the shapes of inputs, or sizes of dimensions, by name; without them the executable chooses.

    Raises:
        OptionError: no plan takes these shapes.
    """
    if not shapes:
        return executable.example_inputs()
    if ranged := as_ranged(executable):
        return ranged.inputs_at(sizes_of(ranged, shapes))
    if stateful := as_stateful(executable):
        return stateful.inputs_at(*_rows_of(shapes))
    return plan_at(executable, shapes, "the artifact").get_inputs()


def plan_at(executable: Runnable, shapes: Shapes, name: str | Path) -> PlanExecutable:
    """Return the plan of an executable that takes inputs of these shapes.

    Raises:
        OptionError: no plan takes these shapes, or a part of the model runs on the host.
    """
    from korch.runtime.shaped import ShapedExecutable

    if ranged := as_ranged(executable):
        if not shapes:
            names = ", ".join(f"{d.name}={d.range_text}" for d in ranged.ranges.dimensions)
            raise OptionError("it is for ranges of sizes", str(name), f"--shape and one size of {names}")
        return ranged.serving(sizes_of(ranged, shapes))[0]
    if stateful := as_stateful(executable):
        return stateful.serving(*_rows_of(shapes))
    if isinstance(executable, ShapedExecutable):
        return _shaped_plan(executable, shapes, name)
    if not isinstance(executable, PlanExecutable):
        raise OptionError(
            "parts of it run on the host", where=str(name), expected="an artifact whose plan runs without the host"
        )
    known = {info.name: tuple(info.shape) for info in executable.get_inputs()}
    if shapes and not {n: tuple(shape) for n, shape in shapes.items()}.items() <= known.items():
        raise OptionError(
            "its plan has other shapes", where="option --shape", expected=f"{shapes_text(known)}, or nothing"
        )
    return executable


def as_ranged(executable: Runnable) -> RangedExecutable | None:
    """Return an executable if it is for ranges of sizes, else None."""
    from korch.runtime.ranged import RangedExecutable

    return executable if isinstance(executable, RangedExecutable) else None


def as_stateful(executable: Runnable) -> StatefulExecutable | None:
    """Return an executable if it has states, else None."""
    from korch.runtime.stateful import StatefulExecutable

    return executable if isinstance(executable, StatefulExecutable) else None


def _rows_of(shapes: Shapes) -> tuple[int, int]:
    """Return the numbers of earlier and of new rows of a run."""
    if shapes.keys() != {"past", "rows"} or any(len(shape) != 1 for shape in shapes.values()):
        expected = "past= and rows=, as --shape past=100 --shape rows=1"
        raise OptionError("the artifact has states", "option --shape", expected)
    return shapes["past"][0], shapes["rows"][0]


def _shaped_plan(executable: ShapedExecutable, shapes: Shapes, name: str | Path) -> PlanExecutable:
    plans = list(executable.plans.values())
    types = [{info.name: tuple(info.shape) for info in plan.get_inputs()} for plan in plans]
    wanted = {n: tuple(shape) for n, shape in shapes.items()}
    fits = [plan for plan, known in zip(plans, types, strict=True) if wanted.items() <= known.items()]
    if not shapes:
        raise OptionError("it has several plans", str(name), "--shape with " + " or ".join(map(shapes_text, types)))
    if len(fits) != 1:
        raise OptionError(
            f"{len(fits)} plans of {name} take these shapes",
            "option --shape",
            "those of one: " + " or ".join(map(shapes_text, types)),
        )
    return fits[0]


def sizes_of(executable: RangedExecutable, shapes: Shapes) -> tuple[int, ...]:
    """Return the size of each dimension of an executable for ranges, in steps, as given by shapes.

    Raises:
        OptionError: the shapes do not give a size for a dimension, or one that is out of its range, or are for others.
    """
    names = {dimension.name: None for dimension in executable.ranges.dimensions}
    if unknown := shapes.keys() - names.keys():
        raise OptionError(f"{min(unknown)!r} has no range", "option --shape", " and ".join(names))
    sizes = []
    for dimension in executable.ranges.dimensions:
        shape = shapes.get(dimension.name, ())
        axis = dimension.axis or 0
        size = shape[axis] if axis < len(shape) and (dimension.axis is not None or len(shape) == 1) else -1
        steps = dimension.steps_of(size)
        if steps is None:
            raise OptionError(
                f"it does not give {str(dimension)!r} a size of its range",
                where="option --shape",
                expected=f"{dimension.name}= and one of {dimension.range_text}",
            )
        sizes.append(steps)
    return tuple(sizes)


def shapes_text(shapes: Shapes) -> str:
    """Return shapes by name, in the form of the option --shape."""
    return " ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
