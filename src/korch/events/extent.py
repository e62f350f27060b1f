"""The number of coordinates that are divided among the tasks of a stage: an expression of the sizes of a run, as text.

    min(512, n[0])                      rows of a length
    12 * ((min(512, n[0]) + 31) // 32)  blocks of 32 rows of 12 heads

A quotient is rounded down. The syntax of these texts is a part of Python's, so that Python's parser reads them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from korch.errors import InvalidGraphError
from korch.tile.index import Atom, Choice, Expr, Quotient, Var
from korch.tile.program import Stage, TileProgram
from korch.tile.shares import Shares, shares_of
from korch.tile.trim import PLAIN, Count, exprs_of

_OPERATIONS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_SIGNS = {ast.Add: "+", ast.Mult: "*", ast.FloorDiv: "/"}
_NEUTRAL = {ast.Add: 0, ast.Mult: 1, ast.FloorDiv: 1}
_FUNCTIONS = {"min": min, "max": max}
_CPP_FUNCTIONS = {"min": "smaller", "max": "larger"}


@dataclass(frozen=True)
class RunExtent:
    """A number that is computed from the sizes of a run; equal texts give equal numbers for all sizes."""

    text: str

    @staticmethod
    def of(text: str) -> RunExtent:
        """Return the extent of a text, without neutral elements such as a factor of 1.

        Raises:
            InvalidGraphError: it contains anything except numbers, sizes n[0], n[1], ..., sums, products, quotients by
                numbers, and the minimum or maximum of two.
        """
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            node = ast.Constant(None)
        return RunExtent(ast.unparse(_reduced(node, text)))

    @cached_property
    def _node(self) -> ast.expr:
        return ast.parse(self.text, mode="eval").body

    def at(self, sizes: Sequence[int]) -> int:
        """Return the number for some sizes."""
        return _value(self._node, sizes)

    @property
    def cpp(self) -> str:
        """The expression in C++ (`korch_plan.h`), of a pointer `n` to the sizes."""
        return _cpp(self._node)


def _reduced(node: ast.expr, text: str) -> ast.expr:
    """Return a checked expression without neutral elements."""
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return node
        case ast.Subscript(value=ast.Name(id="n"), slice=ast.Constant(value=int())):
            return node
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            left, right = _reduced(left, text), _reduced(right, text)
            neutral = _NEUTRAL[type(op)]
            if isinstance(right, ast.Constant) and right.value == neutral:
                return left
            if isinstance(left, ast.Constant) and left.value == neutral and not isinstance(op, ast.FloorDiv):
                return right
            is_number = isinstance(right, ast.Constant) and right.value != 0
            if is_number or not isinstance(op, ast.FloorDiv):
                return ast.BinOp(left, op, right)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _FUNCTIONS:
            return ast.Call(node.func, [_reduced(left, text), _reduced(right, text)], [])
    raise InvalidGraphError(f"{text!r} is no extent", where="task graph")


def _value(node: ast.expr, sizes: Sequence[int]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Subscript(slice=ast.Constant(value=int() as number)):
            return int(sizes[number])
        case ast.BinOp(left=left, op=op, right=right):
            return int(_OPERATIONS[type(op)](_value(left, sizes), _value(right, sizes)))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return _FUNCTIONS[name](_value(left, sizes), _value(right, sizes))
    raise AssertionError(ast.unparse(node))


def _cpp(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return f"({_cpp(left)} {_SIGNS[type(op)]} {_cpp(right)})"
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return f"{_CPP_FUNCTIONS[name]}({_cpp(left)}, {_cpp(right)})"
    return ast.unparse(node)


@dataclass(frozen=True)
class Counted:
    """How a stage whose grid depends on the sizes is divided among threads.

    Attributes:
        extent: the number of coordinates, or of grid points.
        shares: how coordinates are divided; None if grid points are divided.
    """

    extent: RunExtent
    shares: Shares | None


def counted_of(program: TileProgram, stage: Stage, counts: Mapping[str, Count]) -> Counted | None:
    """Return how a stage of a program is divided among threads; None if its grid does not depend on a size.

    Raises:
        InvalidGraphError: the stage does something for some sizes that it does not do for larger sizes.
    """
    sizes = {p.name: f"min({p.high}, {counts[p.name].text('n', PLAIN)})" for p in program.parameters}
    _require_growing(stage, sizes)
    if all(isinstance(axis.size, int) for axis in stage.grid):
        return None
    shares = shares_of(stage, program.parameter_ranges)
    if shares is not None:
        return Counted(RunExtent.of(sizes[shares.parameter]), shares)
    texts = (str(a.size) if isinstance(a.size, int) else f"({_expr_text(a.size, sizes)})" for a in stage.grid)
    return Counted(RunExtent.of(" * ".join(texts)), None)


def _require_growing(stage: Stage, sizes: Mapping[str, str]) -> None:
    """Raise an error if loops do not grow with all parameters, or if anything else depends on the parameters.

    Otherwise, a stage touches for larger sizes everything that it touches for smaller sizes.
    """
    for loops, step in stage.leaves:
        chosen = [loop.only.index for loop in loops if loop.only is not None]
        if any(not expr.variables.isdisjoint(sizes) for expr in (*exprs_of(step), *chosen)):
            raise InvalidGraphError("the place of an element depends on a size", where="task graph")
        for axis in (*stage.grid, *(loop.axis for loop in loops), *step.axes):
            for size in (axis.size, *(axis.ragged or ())[1:]):
                if isinstance(size, Expr):
                    _expr_text(size, sizes)


def _expr_text(expr: Expr, sizes: Mapping[str, str]) -> str:
    """Return the text of an expression that grows with the sizes; raise an error if it does not."""
    if any(coefficient < 0 for _, coefficient in expr.terms):
        raise InvalidGraphError(f"{expr} falls with a size", where="task graph")
    terms = [f"{coefficient} * ({_atom_text(atom, sizes)})" for atom, coefficient in expr.terms]
    return " + ".join([*terms, str(expr.constant)])


def _atom_text(atom: Atom, sizes: Mapping[str, str]) -> str:
    match atom:
        case Var(name):
            return sizes[name]
        case Quotient(inner, divisor):
            return f"({_expr_text(inner, sizes)}) // {divisor}"
        case Choice(inner, ((limit, then),), otherwise) if then == inner and otherwise == Expr(limit):
            return f"min({limit}, {_expr_text(inner, sizes)})"
    raise InvalidGraphError(f"{atom} is no extent", where="task graph")
