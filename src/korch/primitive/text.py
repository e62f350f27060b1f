"""The text form of a primitive graph: deterministic, with one item per line, parseable.

    graph(%0 "image": f32[1,3,8,8]) -> (%4 "out")
    %1: f32[8,3,3,3] = constant {digest=1f0c2ab4d5e6f708}
    %2: f32[1,8,8,8] = constant {uniform=0.0}
    %3: f32[1,8,8,8] = conv(%0, %1) {strides=(1, 1), ...}   # Conv_0
    %4: f32[1,8,8,8] = max(%3, %2)   # Relu_1
       | where(%5, %3, %2)   # by relu-is-where

Further alternatives of a value are lines that begin with a bar. The elements of a constant are
written out if there are few; otherwise the line contains their digest, and `parse_graph` takes them
from a mapping or generates seeded random ones.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from korch.errors import InvalidGraphError
from korch.primitive.graph import Constant, Primitive, PrimitiveGraph
from korch.primitive.op import Array, Attributes
from korch.primitive.ops import OPS
from korch.primitive.types import ValueType

INLINE_ELEMENTS = 8
_NAMED = re.compile(r'%(\d+) "((?:[^"\\]|\\.)*)"(?:: (\w+\[[\d,]*\]))?')
_END = r'%\d+ "(?:[^"\\]|\\.)*"'
_INPUT = _END + r": \w+\[[\d,]*\]"
_ENDS = re.compile(rf"\w+\((?:{_INPUT}(?:, {_INPUT})*)?\) -> \((?:{_END}(?:, {_END})*)?\)\s*")
# The characters that would end a line inside a quoted name (those at which `str.splitlines` splits).
_ESCAPES = {c: f"\\u{ord(c):04x}" for c in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"}


def format_graph(graph: PrimitiveGraph) -> str:
    """Return the text form of a graph."""
    lines = [f"graph{format_ends(graph)}"]
    for value, type_ in enumerate(graph.types):
        if value in graph.constants:
            lines.append(format_constant(value, graph.constants[value]))
        for position, p in enumerate(graph.producers[value]):
            head = "   | " if position else f"%{value}: {type_} = "
            origin = graph.origins[p] if graph.origins else ""
            comment = f"   # {origin}" if origin else ""
            lines.append(head + format_primitive(graph.primitives[p]) + comment)
    return "\n".join(lines) + "\n"


def format_ends(graph: PrimitiveGraph) -> str:
    """Return the inputs and outputs of a graph as `(%0 "x": f32[4]) -> (%1 "y")`."""
    inputs = ", ".join(f"%{v} {_quote(name)}: {graph.types[v]}" for name, v in graph.inputs)
    outputs = ", ".join(f"%{v} {_quote(name)}" for name, v in graph.outputs)
    return f"({inputs}) -> ({outputs})"


def format_constant(value: int, constant: Constant) -> str:
    """Return the line of a constant."""
    return f"%{value}: {constant.type} = constant {{{_elements(constant)}}}"


def format_primitive(primitive: Primitive) -> str:
    """Return a primitive's operation, inputs and attributes as text."""
    inputs = ", ".join(f"%{value}" for value in primitive.inputs)
    return f"{primitive.op}({inputs}){format_attributes(primitive.attributes)}"


def format_attributes(attributes: Attributes) -> str:
    """Return attributes as ` {name=value, ...}`, or as an empty text if all have their defaults."""
    kind: Any = type(attributes)
    names = _field_names(kind)
    if attributes == _default(kind):
        return ""
    fields = [f"{name}={_literal(getattr(attributes, name))}" for name in names]
    return f" {{{', '.join(fields)}}}"


@cache
def _default(kind: type[Attributes]) -> Attributes | None:
    """Return the attributes of a kind that all have their defaults; None if one has none."""
    try:
        return kind()
    except TypeError:
        return None


def parse_graph(text: str, constants: Mapping[str, Array] | None = None) -> PrimitiveGraph:
    """Return the graph that prints as `text`.

    `constants`: elements by digest; a constant that is not there gets seeded random ones.

    Raises:
        InvalidGraphError: a line can't be read.
    """
    return _Parser(constants or {}).parse(text)


def parse_ends(text: str) -> tuple[list[tuple[str, int, ValueType]], list[tuple[str, int]]]:
    """Return the inputs, with their types, and the outputs from the first line of a graph, `graph(...) -> (...)`.

    Raises:
        InvalidGraphError: the line can't be read.
    """
    if not _ENDS.fullmatch(text):
        raise InvalidGraphError(f"can't read {text!r}", "line 1", expected='graph(%0 "x": TYPE, ...) -> (%1 "y", ...)')
    named = _NAMED.findall(text)  # inputs have a type, outputs have none
    inputs = [(_unquote(name), int(value), ValueType.parse(type_)) for value, name, type_ in named if type_]
    return inputs, [(_unquote(name), int(value)) for value, name, type_ in named if not type_]


def parse_constants(text: str, constants: Mapping[str, Array] | None = None) -> dict[int, Constant]:
    """Return the constants that some lines define, by value.

    Raises:
        InvalidGraphError: a line can't be read.
    """
    parser = _Parser(constants or {})
    parser.lines(text, 1)
    return parser.constants


def printed_calls(text: str) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the value, the operation and the inputs of each primitive in a text form; constants are not read."""
    calls, value = [], -1
    for line in (line.partition("   # ")[0] for line in text.splitlines()):
        if match := _Parser.VALUE.match(line):
            value = int(match[1])
        call = _Parser.CALL.match(match[3] if match else line.removeprefix("   | "))
        if call is not None:
            calls.append((value, call[1], _Parser.values(call[2])))
    return calls


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@lru_cache(1024)
def _quote(name: str) -> str:
    plain = name.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(_ESCAPES.get(c, c) for c in plain) + '"'


def _literal(value: object) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return f"'{value}'"
    return repr(value)


def _scalar_text(value: Any) -> str:
    item = value.item() if hasattr(value, "item") else value
    item = float(item) if not isinstance(item, (bool, int, float)) else item  # bfloat16
    return _literal(item)


def is_written_out(constant: Constant) -> bool:
    """Return whether the text form has a constant's elements."""
    return constant.is_uniform or constant.array.size <= INLINE_ELEMENTS


def _elements(constant: Constant) -> str:
    if constant.is_uniform:
        return f"uniform={_scalar_text(constant.scalar)}"
    if is_written_out(constant):
        items = ", ".join(_scalar_text(x) for x in constant.array.reshape(-1))
        return f"elements=[{items}]"
    return f"digest={constant.digest}"


class _Parser:
    """The state of one parse: tables that are extended line by line."""

    VALUE = re.compile(r"%(\d+): (\S+) = (.*)$")
    CALL = re.compile(r"(\w+)\(([^)]*)\)(?: \{(.*)\})?$")

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self.types: dict[int, ValueType] = {}
        self.primitives: list[Primitive] = []
        self.origins: list[str] = []
        self.constants: dict[int, Constant] = {}
        self.current = -1

    def parse(self, text: str) -> PrimitiveGraph:
        head, _, body = text.partition("\n")
        if not head.startswith("graph("):
            raise InvalidGraphError("the text does not begin with 'graph('", where="line 1")
        inputs, outputs = parse_ends(head)
        self.types |= {value: type_ for _, value, type_ in inputs}
        self.lines(body, 2)
        if sorted(self.types) != list(range(len(self.types))):
            raise InvalidGraphError("the values are not numbered 0, 1, 2, ...")
        return PrimitiveGraph(
            types=tuple(self.types[v] for v in range(len(self.types))),
            primitives=tuple(self.primitives),
            inputs=tuple((name, value) for name, value, _ in inputs),
            outputs=tuple(outputs),
            constants=self.constants,
            origins=tuple(self.origins),
        )

    def lines(self, text: str, first: int) -> None:
        """Read lines; `first` is the line number of the first one."""
        for number, line in enumerate(text.splitlines(), first):
            if line.strip():
                try:
                    self._line(line)
                except (ValueError, KeyError, TypeError, SyntaxError) as error:
                    raise InvalidGraphError(f"can't read {line.strip()!r}: {error}", where=f"line {number}") from error

    def _line(self, line: str) -> None:
        content, _, origin = line.partition("   # ")
        if content.startswith("   | "):
            self._call(content[5:], origin)
            return
        match = self.VALUE.match(content)
        if match is None:
            raise ValueError("expected '%N: TYPE = ...'")
        self.current = int(match[1])
        self.types[self.current] = ValueType.parse(match[2])
        if match[3].startswith("constant {"):
            self.constants[self.current] = self._constant(match[3][10:-1])
        else:
            self._call(match[3], origin)

    def _call(self, text: str, origin: str) -> None:
        match = self.CALL.match(text)
        if match is None:
            raise ValueError("expected 'op(%N, ...) {...}'")
        row = OPS[match[1]]
        attributes = _parse_attributes(row.attributes, match[3] or "")
        self.primitives.append(Primitive(row.name, self.values(match[2]), attributes, self.current))
        self.origins.append(origin)

    @staticmethod
    def values(text: str) -> tuple[int, ...]:
        """Read the inputs of a call, `%1, %2`."""
        return tuple(int(item.strip()[1:]) for item in text.split(",") if item.strip())

    def _constant(self, text: str) -> Constant:
        type_ = self.types[self.current]
        kind, _, content = text.partition("=")
        if kind == "digest":
            array = self.arrays.get(content)
            if array is None:
                rng = np.random.default_rng(int(content, 16))
                array = rng.uniform(-1, 1, type_.shape).astype(type_.dtype.numpy)
            return Constant(array, content)
        elements = ast.literal_eval(content)
        items = elements if isinstance(elements, list) else [elements]
        dtype = type_.dtype
        wide = np.array([float(x) for x in items]) if dtype.is_float else np.array(items, dtype.numpy)
        filled = np.empty(type_.shape, dtype.numpy)
        filled.reshape(-1)[:] = wide.astype(dtype.numpy)
        return Constant.of(filled)


def _unquote(name: str) -> str:
    back = {text[1:]: c for c, text in _ESCAPES.items()}
    return re.sub(r"\\(u[0-9a-f]{4}|.)", lambda m: back.get(m[1], m[1]), name)


def _parse_attributes(kind: type[Attributes], text: str) -> Attributes:
    if not text:
        return kind()
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("expected attributes")
    fields = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg}
    for name, value in fields.items():
        if value in ("inf", "-inf", "nan"):
            fields[name] = float(value)
    return kind(**fields)
