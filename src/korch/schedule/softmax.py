"""The rows of a softmax in a tile -> passes: maxima, exponentials, sums, and rescaling factors.

Weights are exp(min(x - base, 0)) with the row's maximum as base. NaN stays NaN. The minimum with 0 changes
nothing, but tells printers that the exponent is not positive. If a row is divided into parts, the base of a
part that is -infinity throughout is 0, so that its weights are 0. If weights that are NaN are to become 0, the
base of a row that has a NaN is infinity: then all of the row's weights, and all factors, are 0 or NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from korch.primitive.types import DType
from korch.tile.ir.program import Accumulate, At, Axis, Load, Pass, Store
from korch.tile.lower.emit import Operations


class _Values(Operations):
    """The operations of a pass on float32."""

    def read(self, at: At) -> str:
        return self.load(DType.F32, at.buffer, at.index)

    def number(self, value: float) -> str:
        return self.literal(DType.F32, value)

    def stored(self, axes: tuple[Axis, ...], *sinks: tuple[At, str]) -> Pass:
        """Return the pass that stores values."""
        stores = tuple(Store(at.buffer, at.index, value) for at, value in sinks)
        return Pass(axes, axes[-1].name, tuple(self.ops), stores)


@dataclass(frozen=True)
class SoftmaxRows:
    """Some rows of a softmax."""

    axis: Axis  # the loop over the rows
    is_guarded: bool  # whether weights that are NaN become 0
    is_in_parts: bool  # whether rows are divided into parts, some of which may be -infinity throughout

    @property
    def has_base(self) -> bool:
        """Whether the base may differ from the maximum."""
        return self.is_guarded or self.is_in_parts

    def largest(self, x: At, along: Axis, most: At) -> Pass:
        """Return the pass that finds the maximum of each row."""
        return self._reduced(x, along, most, "max")

    def sums(self, x: At, along: Axis, total: At) -> Pass:
        """Return the pass that adds up each row."""
        return self._reduced(x, along, total, "sum")

    def _reduced(self, x: At, along: Axis, out: At, op: str) -> Pass:
        axes, load = (self.axis, replace(along, is_reduced=True)), Load("x0", DType.F32, x.buffer, x.index)
        return Pass(axes, along.name, (load,), (Accumulate(out.buffer, out.index, "x0", op),))

    def base(self, most: At, base: At) -> Pass:
        """Return the pass that computes the base, which is subtracted from the numbers of each row."""
        values = _Values()
        name = self._base(values, values.read(most))
        return values.stored((self.axis,), (base, name))

    def _base(self, values: _Values, most: str) -> str:
        is_least = values.apply(DType.BOOL, "equal", most, values.number(-math.inf))
        base = values.apply(DType.F32, "where", is_least, values.number(0.0), most)
        if not self.is_guarded:
            return base
        is_nan = values.apply(DType.BOOL, "isnan", most)
        return values.apply(DType.F32, "where", is_nan, values.number(math.inf), base)

    def weights(self, x: At, along: Axis, base: At, out: At | None = None) -> Pass:
        """Return the pass that computes the weights, in place if `out` is not given."""
        values = _Values()
        name = self._weight(values, values.read(x), values.read(base))
        return values.stored((self.axis, along), (out or x, name))

    def _weight(self, values: _Values, x: str, base: str) -> str:
        difference = values.apply(DType.F32, "sub", x, base)
        power = values.apply(DType.F32, "exp", values.apply(DType.F32, "min", difference, values.number(0.0)))
        if not self.is_guarded:
            return power
        is_nan = values.apply(DType.BOOL, "isnan", power)
        return values.apply(DType.F32, "where", is_nan, values.number(0.0), power)

    def rescaled(self, of_row: Callable[[str], At]) -> list[Pass]:
        """Return the pass that combines the maxima `most` of a part with the previous maxima, `top`.

        It stores the new maxima in `above`, the base to subtract in `base`, and the factor that rescales the
        previous sums in `factor`.
        """
        values = _Values()
        top = values.read(of_row("top"))
        above = values.apply(DType.F32, "max", top, values.read(of_row("most")))
        base = self._base(values, above)
        factor = self._weight(values, top, base)
        sinks = ((of_row("above"), above), (of_row("base"), base), (of_row("factor"), factor))
        return [values.stored((self.axis,), *sinks)]

    def carried(self, of_row: Callable[[str], At]) -> list[Pass]:
        """Return the passes that add the sums `part` of a part to the rescaled `total`, and update the maxima `top`.

        No pass changes what it reads, because the last vector of rows may be computed twice.
        """
        values = _Values()
        scaled = values.apply(DType.F32, "mul", values.read(of_row("total")), values.read(of_row("factor")))
        whole = values.apply(DType.F32, "add", scaled, values.read(of_row("part")))
        more = values.stored((self.axis,), (of_row("more"), whole))
        after = _Values()
        sinks = ((of_row("total"), after.read(of_row("more"))), (of_row("top"), after.read(of_row("above"))))
        return [more, after.stored((self.axis,), *sinks)]

    def inverted(self, total: At, inverse: At) -> Pass:
        """Return the pass that computes the factor by which to multiply the sums of a row: 1 / total."""
        values = _Values()
        name = values.read(total)
        if self.is_guarded:
            zero, one = values.number(0.0), values.number(1.0)
            name = values.apply(DType.F32, "where", values.apply(DType.BOOL, "less", zero, name), name, one)
        return values.stored((self.axis,), (inverse, values.apply(DType.F32, "reciprocal", name)))
