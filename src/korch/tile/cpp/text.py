"""C++ text: lines, expressions, element types, literals, loop bounds."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import assert_never

from korch.primitive.types import DType
from korch.tile.ir.growth import TextLimitError
from korch.tile.ir.index import ROWS, Atom, Choice, Expr, Quotient, Remainder, TableEntry, Times, Var
from korch.tile.ir.program import Axis, TileProgram

MOST_CHARACTERS = 1 << 20
"""The maximum characters of a kernel's lines; a compiler takes about a minute for them."""

C_TYPE = {
    DType.F64: "double",
    DType.F32: "float",
    DType.I64: "int64_t",
    DType.I32: "int32_t",
    DType.I16: "int16_t",
    DType.I8: "int8_t",
    DType.U64: "uint64_t",
    DType.U32: "uint32_t",
    DType.U16: "uint16_t",
    DType.U8: "uint8_t",
    DType.BOOL: "uint8_t",
    DType.F16: "float",
    DType.BF16: "float",
}
"""The C++ type in which each element type is computed."""

NARROW_TYPE = {DType.F16: "korch::half", DType.BF16: "korch::bfloat16"}
"""The C++ types of element types that inputs and outputs may have, but in which nothing is computed."""


def literal(dtype: DType, value: float | int | bool) -> str:
    """Return a number as a C++ literal of the type in which it is computed."""
    if dtype is DType.BOOL:
        return "1" if value else "0"
    if not dtype.is_float:
        if value == -(1 << 63):
            return "INT64_MIN"
        return (
            f"{int(value)}"
            + ("LL" if abs(value) >= 1 << 31 else "") * (value < 1 << 63)
            + ("ULL" if value >= 1 << 63 else "")
        )
    number = float(value)
    if math.isnan(number):
        text = '__builtin_nanf("")'
    elif math.isinf(number):
        text = "__builtin_inff()" if number > 0 else "-__builtin_inff()"
    else:
        return f"{number!r}" if dtype is DType.F64 else f"{number!r}f"
    return text.replace("nanf", "nan").replace("inff", "inf") if dtype is DType.F64 else text


def loop_end(axis: Axis, high: int) -> str:
    """Return the end of the loop over the first `high` values of an axis; the last tile of a ragged axis ends early."""
    if axis.ragged is None:
        return str(high)
    outer, total = axis.ragged
    end = str(total) if isinstance(total, int) else total
    return f"korch::smaller({high}, {end} - {axis.extent} * {outer})"


class CppWriter:
    """Collects lines of C++ with their indentation, and the tables that their expressions read.

    Attributes:
        program: the program that is printed.
        lanes: float32 elements in a vector register.
        streamed: the buffers that are written past the caches.
        large: the inputs that are too large for a core's private cache.
        lines: the lines printed so far.
        tables: constant tables and their names.
        lambdas: the number of lambdas printed so far.
    """

    def __init__(
        self,
        program: TileProgram,
        lanes: int,
        streamed: Set[str] = frozenset(),
        large: Set[str] = frozenset(),
        depth: int = 1,
    ) -> None:
        self.program = program
        self.lanes = lanes
        self.streamed = streamed
        self.large = large
        self.lines: list[str] = []
        self.tables: dict[tuple[int, ...], str] = {}
        self.lambdas = 0
        self._depth = depth
        self._characters = 0

    def line(self, text: str) -> None:
        """Print a line.

        Raises:
            TextLimitError: the text becomes too long.
        """
        self.lines.append(text if text.startswith("#") else "  " * self._depth + text)
        self._characters += len(self.lines[-1])
        if self._characters > MOST_CHARACTERS:
            raise TextLimitError(f"its text would have more than {MOST_CHARACTERS >> 10} KiB")

    def open(self, text: str) -> None:
        """Print the beginning of a block."""
        if text.startswith("#"):
            self.line(text)
            text = ""
        self.line(f"{text} {{".strip())
        self._depth += 1

    def close(self, end: str = "}") -> None:
        """Print the end of a block."""
        self._depth -= 1
        self.line(end)

    def expr(self, expr: Expr) -> str:
        """Return the text of an expression."""
        parts = []
        for atom, coefficient in expr.terms:
            text = self._atom(atom)
            parts.append(text if coefficient == 1 else f"{coefficient} * {text}")
        if expr.constant or not parts:
            parts.append(str(expr.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name):
                return name
            case Quotient(inner, divisor):
                return f"(({self.expr(inner)}) / {divisor})"
            case Remainder(inner, divisor):
                return f"(({self.expr(inner)}) % {divisor})"
            case TableEntry(table, inner) if table == ROWS:
                return f"row_at[{self.expr(inner)}]"
            case TableEntry(table, inner):
                name = self.tables.setdefault(table, f"table{len(self.tables)}")
                return f"NAME_{name}[{self.expr(inner)}]"
            case Choice(inner, cases, otherwise):
                at = self.expr(inner)
                text = "".join(f"({at}) < {n} ? ({self.expr(then)}) : " for n, then in cases)
                return f"({text}({self.expr(otherwise)}))"
            case Times():
                raise AssertionError("a printed program has no parameters")
            case _:
                assert_never(atom)
