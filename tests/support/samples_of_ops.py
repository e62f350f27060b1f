"""Legal and illegal inputs of each primitive operation, for tests of all operations."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from korch.primitive.op import NONE, Attributes
from korch.primitive.ops.elementwise import BINARY, PREDICATES, UNARY, CastAttributes
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes, MatmulAttributes
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.ops.state import WRITE_ROWS, WriteAttributes
from korch.primitive.ops.stored import STORED, StoredAttributes
from korch.primitive.ops.winograd import WinogradAttributes
from korch.primitive.types import ValueType


@dataclass(frozen=True, slots=True)
class Sample:
    """Input types and attributes for one test of an operation."""

    inputs: tuple[str, ...]
    attributes: Attributes = NONE

    @property
    def types(self) -> tuple[ValueType, ...]:
        """The inputs' types, parsed."""
        return tuple(ValueType.parse(text) for text in self.inputs)


Samples = tuple[Sample, ...]


def _loop(trips: int, output: int) -> Sample:
    body = (
        'graph(%0 "i0": f32[2], %1 "i1": f32[2]) -> (%2 "o0", %3 "o1")\n'
        "%2: f32[2] = mul(%0, %1)\n%3: f32[2] = add(%2, %0)\n"
    )
    types = ("f32[2]", "f32[3,2]")
    return Sample(types, LoopAttributes(body, trips, 1, (False,), (True,), types, types, output))


def _opaque(input_text: str, output_text: str) -> Sample:
    node = onnx.helper.make_node("Elu", ["x0"], ["y0"], alpha=2.0)
    attributes = OpaqueAttributes("Elu", "", 17, node.SerializeToString().hex(), (input_text,), (output_text,), 0)
    return Sample(("f32[2,3]",), attributes)


_ALONG_1, _FOUR, _PADDED = WriteAttributes(1), StoredAttributes(4, 4, 8), WinogradAttributes(4, (1, 1), (1, 1))
_PLAIN = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
_WIDE = PoolAttributes((3, 3), (2, 1), (1, 0), (0, 1), (1, 2))
_REDUCED: tuple[Samples, Samples] = (
    (
        Sample(("f32[2,3,5]",), ReduceAttributes((1, 2))),
        Sample(("f32[2,1,5]",), ReduceAttributes((1,))),
        Sample(("i32[2,0,5]",), ReduceAttributes((1,))),
    ),
    (Sample(("f32[2]",), ReduceAttributes((1,))), Sample(("f32[2,2]",), ReduceAttributes((1, 0)))),
)
_POOLED: tuple[Samples, Samples] = (
    (Sample(("f32[1,2,7,6]",), _WIDE), Sample(("f32[1,2,4]",), PoolAttributes((2,), (2,), (0,), (0,), (1,)))),
    (Sample(("f32[1,1,2,2]",), _WIDE), Sample(("f32[4]",), _WIDE)),
)

_TABLE: Mapping[str, tuple[Samples, Samples]] = {
    **{f"reduce_{name}": _REDUCED for name in ("sum", "prod", "max", "min")},
    **{f"pool_{name}": _POOLED for name in ("sum", "max")},
    "broadcast": (
        (Sample(("f32[3,1]",), BroadcastAttributes((2, 3, 4))), Sample(("f32[]",), BroadcastAttributes((2, 0)))),
        (Sample(("f32[3]",), BroadcastAttributes((4,))), Sample(("f32[1,3]",), BroadcastAttributes((3,)))),
    ),
    "where": (
        (Sample(("bool[2,3]", "f32[2,3]", "f32[2,3]")),),
        (
            Sample(("f32[2]", "f32[2]", "f32[2]")),
            Sample(("bool[2]", "f32[3]", "f32[3]")),
            Sample(("bool[2]", "f32[2]", "i32[2]")),
        ),
    ),
    "cast": (
        (Sample(("f32[4]",), CastAttributes("i32")), Sample(("bool[4]",), CastAttributes("f32"))),
        (Sample(("f32[4]",), CastAttributes("f31")),),
    ),
    "transpose": (
        (Sample(("f32[2,3,5]",), TransposeAttributes((2, 0, 1))), Sample(("f32[]",), TransposeAttributes(()))),
        (Sample(("f32[2,3]",), TransposeAttributes((0, 0))),),
    ),
    "reshape": (
        (Sample(("f32[2,6]",), ReshapeAttributes((3, 4))), Sample(("f32[0,3]",), ReshapeAttributes((1, 0)))),
        (Sample(("f32[2,6]",), ReshapeAttributes((5,))), Sample(("f32[4]",), ReshapeAttributes((-2, -2)))),
    ),
    "slice": (
        (
            Sample(("f32[5,7]",), SliceAttributes((1, 6), (2, 3), (2, -2))),
            Sample(("f32[5]",), SliceAttributes((0,), (0,), (1,))),
        ),
        (
            Sample(("f32[5]",), SliceAttributes((0,), (6,), (1,))),
            Sample(("f32[5]",), SliceAttributes((0,), (2,), (0,))),
            Sample(("f32[5]",), SliceAttributes((0, 0), (2, 2), (1, 1))),
        ),
    ),
    "pad": (
        (
            Sample(("f32[4,5]",), PadAttributes((1, 0), (0, 2), "constant", 1.5)),
            *(Sample(("f32[4,5]",), PadAttributes((2, 1), (1, 2), mode)) for mode in ("reflect", "edge", "wrap")),
            Sample(("f32[0,2]",), PadAttributes((1, 0), (1, 0))),
        ),
        (
            Sample(("f32[4]",), PadAttributes((1,), (1,), "mirror")),
            Sample(("f32[4]",), PadAttributes((-1,), (0,))),
            Sample(("f32[4]",), PadAttributes((1, 1), (0, 0))),
            Sample(("f32[0]",), PadAttributes((1,), (0,), "edge")),
        ),
    ),
    "concat": (
        (Sample(("f32[2,3]", "f32[2,1]", "f32[2,0]"), ConcatAttributes(1)),),
        (Sample(("f32[2,3]", "f32[1,3]"), ConcatAttributes(1)), Sample(("f32[2]",), ConcatAttributes(1))),
    ),
    "take": (
        (Sample(("f32[3,4]",), TakeAttributes(1, (3, 0, 0, 1, 2))), Sample(("f32[3,4]",), TakeAttributes(0, ()))),
        (Sample(("f32[3]",), TakeAttributes(0, (3,))), Sample(("f32[3]",), TakeAttributes(1, (0,)))),
    ),
    "conv": (
        (
            Sample(("f32[1,4,7,6]", "f32[6,2,3,3]"), ConvAttributes((2, 1), (1, 0), (0, 2), (1, 2), 2)),
            Sample(("f32[2,3,5]", "f32[4,3,1]"), ConvAttributes((1,), (0,), (0,), (1,))),
            Sample(("u8[1,4,5,6]", "i8[6,2,3,3]"), ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), 2)),
        ),
        (
            Sample(("f32[1,4,7,6]", "f32[6,3,3,3]"), _PLAIN),
            Sample(("f32[1,4,2,6]", "f32[6,4,3,3]"), _PLAIN),
            Sample(("f32[1,4,7,6]", "f32[6,4,3]"), _PLAIN),
            Sample(("f32[1,4,7,6]", "f64[6,4,3,3]"), _PLAIN),
            Sample(("u8[1,4,7,6]", "i32[6,4,3,3]"), _PLAIN),
            Sample(("f32[1,4,7,6]", "f32[3,2,3,3]"), ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1), 2)),
            Sample(("f32[1,4,7,6]", "f32[6,4,3,3]"), ConvAttributes((0, 1), (0, 0), (0, 0), (1, 1))),
        ),
    ),
    "matmul": (
        (
            Sample(("f32[3,4]", "f32[4,5]"), MatmulAttributes()),
            Sample(("f32[2,1,3,4]", "f32[1,5,4,2]"), MatmulAttributes()),
            Sample(("f32[3,0]", "f32[0,2]"), MatmulAttributes()),
            Sample(("i8[2,3,4]", "u8[1,4,5]"), MatmulAttributes()),
            Sample(("i64[3,4]", "i64[4,2]"), MatmulAttributes()),
        ),
        (
            Sample(("f32[3,4]", "f32[3,4]"), MatmulAttributes()),
            Sample(("f32[4]", "f32[4]"), MatmulAttributes()),
            Sample(("f32[2,3,4]", "f32[3,4,3]"), MatmulAttributes()),
            Sample(("f32[3,4]", "f64[4,3]"), MatmulAttributes()),
            Sample(("u8[3,4]", "i32[4,3]"), MatmulAttributes()),
        ),
    ),
    STORED: (
        (
            Sample(("f32[2,3,8]", "u8[4,5]", "f32[2,5]"), _FOUR),
            Sample(("f32[3,10]", "u8[6,5]", "f32[3,5]", "u8[3,5]"), _FOUR),
            Sample(("f32[3,6]", "i8[8,5]", "f32[2,5]", "i8[2,5]"), StoredAttributes(8, 4)),
            Sample(("f32[1,6]", "u8[2,5]", "f16[2,5]"), StoredAttributes(2, 3, 1)),
            Sample(("f32[3,14]", "u8[8,5]", "f32[2,5]"), StoredAttributes(4, 8, 8, is_rounded=True)),
        ),
        (
            Sample(("f32[3,8]", "u8[4,5]"), _FOUR),
            Sample(("i8[3,8]", "u8[4,5]", "f32[2,5]"), _FOUR),
            Sample(("f32[3,8]", "i8[4,5]", "f32[2,5]"), _FOUR),
            Sample(("f32[3,8]", "u8[5,5]", "f32[2,5]"), _FOUR),
            Sample(("f32[3,8]", "u8[4,5]", "f32[3,5]"), _FOUR),
            Sample(("f32[3,8]", "u8[4,5]", "f32[2,5]", "i8[2,5]"), _FOUR),
            Sample(("f32[3,8]", "u8[3,5]", "f32[2,5]"), StoredAttributes(3, 4)),
            Sample(("f32[3,8]", "u8[4,5]", "f32[2,5]"), StoredAttributes(4, 0)),
            Sample(("f32[3,8]", "u8[4,5]", "f32[2,5]"), StoredAttributes(4, 4, is_rounded=True)),
        ),
    ),
    GATHERED: (
        (
            Sample(("f32[5,4]", "f32[3,4,6]", "i64[5]")),
            Sample(("f32[1,4]", "f32[8,4,2]", "i32[1]")),
            Sample(("f32[0,4]", "f32[2,4,2]", "i64[0]")),
        ),
        (
            Sample(("f32[5,4]", "f32[3,4,6]")),
            Sample(("f32[1,5,4]", "f32[3,4,6]", "i64[5]")),
            Sample(("f32[5,4]", "f32[3,5,6]", "i64[5]")),
            Sample(("f32[5,4]", "f32[0,4,6]", "i64[5]")),
            Sample(("f32[5,4]", "f16[3,4,6]", "i64[5]")),
            Sample(("f32[5,4]", "f32[3,4,6]", "f32[5]")),
            Sample(("f32[5,4]", "f32[3,4,6]", "i64[4]")),
        ),
    ),
    "winograd": (
        (
            Sample(("f32[1,3,7,6]", "f32[6,6,3,2]"), _PADDED),
            Sample(("f32[2,2,5,4]", "f32[4,4,2,3]"), WinogradAttributes(2, (1, 0), (0, 1))),
            Sample(("u8[1,2,5,4]", "i16[4,4,2,3]"), WinogradAttributes(2, (1, 0), (0, 1))),
        ),
        (
            Sample(("f32[1,3,7,6]", "f32[5,5,3,2]"), WinogradAttributes(3, (1, 1), (1, 1))),
            Sample(("f32[1,3,7,6]", "f32[4,4,3,2]"), _PADDED),
            Sample(("u8[1,3,7,6]", "i8[6,6,3,2]"), _PADDED),
            Sample(("f32[1,3,7,6]", "f32[6,6,2,3]"), _PADDED),
            Sample(("f32[1,3,7]", "f32[6,6,3,2]"), _PADDED),
            Sample(("f32[1,3,1,6]", "f32[6,6,3,2]"), WinogradAttributes(4, (0, 0), (1, 0))),
        ),
    ),
    "opaque": ((_opaque("f32[2,3]", "f32[2,3]"),), (_opaque("f32[3,2]", "f32[3,2]"),)),
    "loop": ((_loop(3, 0), _loop(3, 1)), (_loop(4, 0), _loop(3, 2))),
    WRITE_ROWS: (
        (
            Sample(("f32[2,5,3]", "f32[2,1,3]", "i64[1]"), _ALONG_1),
            Sample(("f32[4]", "f32[2]", "i64[2]"), WriteAttributes(0)),
            Sample(("bf16[1,6,2]", "bf16[1,0,2]", "i64[0]"), _ALONG_1),
        ),
        (
            Sample(("f32[2,5,3]", "f32[2,1,3]"), _ALONG_1),
            Sample(("f32[2,5,3]", "f32[2,1,4]", "i64[1]"), _ALONG_1),
            Sample(("f32[2,5,3]", "f16[2,1,3]", "i64[1]"), _ALONG_1),
            Sample(("f32[2,5,3]", "f32[2,1,3]", "i64[2]"), _ALONG_1),
            Sample(("f32[2,5,3]", "f32[2,1,3]", "i32[1]"), _ALONG_1),
            Sample(("f32[4]", "f32[2]", "i64[2]"), _ALONG_1),
        ),
    ),
}


def _of_function(arity: int, kind: str) -> tuple[Samples, Samples]:
    """Return the samples of a function of operands of one type, of a kind that the table of operations names."""
    good = {"bool": "bool[2,3]", "integer": "u8[2,3]"}.get(kind, "f32[2,3]")
    bad = {"float": "i32[2,3]", "number": "bool[2,3]"}.get(kind, "f32[2,3]")
    legal = [Sample((good,) * arity), Sample((good.replace("[2", "[0"),) * arity)]
    if kind in ("number", "any", "integer"):
        legal.append(Sample(("i32[5]",) * arity))
    illegal = [Sample((bad,) * arity)] if kind != "any" else []
    if arity > 1:
        illegal.append(Sample((good, good.replace("[2", "[1"))))
    return tuple(legal), tuple(illegal)


_FUNCTIONS = {
    **{name: _of_function(1, kind) for name, kind, _ in UNARY},
    **{name: _of_function(2, kind) for name, kind, _ in BINARY},
    **{name: _of_function(arity, kind) for name, arity, kind, _ in PREDICATES},
}

LEGAL: Mapping[str, Samples] = {name: rows[0] for name, rows in {**_FUNCTIONS, **_TABLE}.items()}
"""Legal inputs, by the name of the operation."""

ILLEGAL: Mapping[str, Samples] = {name: rows[1] for name, rows in {**_FUNCTIONS, **_TABLE}.items()}
"""Inputs that its type inference must refuse, by the name of the operation."""
