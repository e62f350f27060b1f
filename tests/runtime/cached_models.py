"""Small decoders whose caches are written by an operator of attention, or by a scatter beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.models.writer import GraphWriter

LAYERS, WIDTH, HEADS, GROUPS, SIZE, WORDS = 1, 16, 4, 2, 16, 32
PLACES = 96
"""The rows of rotary tables."""

Axis = int | str


@dataclass(frozen=True)
class Form:
    """One way to write a decoder."""

    # the operator that writes the cache: "Attention", "TensorScatter", "GroupQueryAttention",
    # "MultiHeadAttention" or "DecoderMaskedMultiHeadAttention"
    kind: str
    opset: int = 24  # the opset of the standard
    past: Axis = "past"  # the axis of the cache's rows: its name, or a fixed capacity
    rows: Axis = "rows"  # the new rows
    batch: Axis = 1  # the sequences
    # how the model knows its rows: "inputs" of the counts, a "mask" of all rows, or "positions" of new ones
    counts: str = "inputs"
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of the operator
    # further inputs of the operator by position: arrays, or names of inputs of the model
    inputs: Mapping[int, Any] = field(default_factory=dict)
    has_rotary: bool = False  # whether positions turn queries and keys
    is_packed: bool = False  # whether queries, keys and values are one input
    has_norms: bool = False  # whether inputs are normalized by operators of ONNX Runtime's

    @property
    def present(self) -> Axis:
        """The axis of the returned cache's rows."""
        is_fixed = self.kind in ("TensorScatter", "DecoderMaskedMultiHeadAttention")
        return self.past if is_fixed or isinstance(self.past, int) else "total"

    @property
    def groups(self) -> int:
        """The heads of keys and values."""
        return HEADS if "MultiHead" in self.kind else GROUPS

    def build(self) -> onnx.ModelProto:
        """Return the model."""
        return _Writer(self).build()


class _Writer(GraphWriter):
    def __init__(self, form: Form) -> None:
        super().__init__("cached", 0)
        self.form = form

    def build(self) -> onnx.ModelProto:
        form = self.form
        x = self.op("Gather", self.normal((WORDS, WIDTH), 1.0, "words"), self.input("ids", (form.batch, form.rows), 7))
        shape = (form.batch, form.groups, form.past, SIZE)
        present = (form.batch, form.groups, form.present, SIZE)
        caches = [[self.input(f"past.{n}.{kind}", shape) for kind in ("key", "value")] for n in range(LAYERS)]
        self.counts()
        if form.has_norms:
            x = self.op("SimplifiedLayerNormalization", x, self.uniform(WIDTH, 0.6, 1.4, "scale"), epsilon=1e-6)
        for n, pair in enumerate(caches):
            widths = (HEADS * SIZE, form.groups * SIZE, form.groups * SIZE)
            parts = [self.op("MatMul", x, self.normal((WIDTH, w), WIDTH**-0.5, "weight")) for w in widths]
            y, found = self.attention(parts, pair)
            x = self.summed(x, self.op("MatMul", y, self.normal((HEADS * SIZE, WIDTH), 0.2, "weight")))
            for kind, value in zip(("key", "value"), found, strict=True):
                self.output(value, f"present.{n}.{kind}", present)
        logits = self.op("MatMul", x, self.normal((WIDTH, WORDS), WIDTH**-0.5, "last"))
        self.output(logits, "logits", (form.batch, form.rows, WORDS))
        graph = onnx.helper.make_graph(self._nodes, "cached", self._inputs, self._outputs, self._initializers)
        opsets = [onnx.helper.make_opsetid("", form.opset), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10 if form.opset < 24 else 12)

    def summed(self, x: str, y: str) -> str:
        """Append a sum, which is normalized if inputs are."""
        if not self.form.has_norms:
            return self.op("Add", x, y)
        scale = self.uniform(WIDTH, 0.6, 1.4, "scale")
        return self.node("SkipSimplifiedLayerNormalization", {0: x, 1: y, 2: scale}, 1, {"epsilon": 1e-6})[0]

    def counts(self) -> None:
        """Declare what counts rows."""
        form, batch = self.form, self.form.batch
        if form.kind == "TensorScatter" and form.counts == "positions":
            positions = self.input("position_ids", (batch, form.rows), 7)
            self.begin = self.reshape(self.slice(positions, 1, 0, 1), (-1,))
            rows = self.op("Gather", self.op("Shape", positions), self.constant(np.array(1), "axis"), axis=0)
            self.valid = self.op("Add", self.begin, rows)
        elif form.kind == "TensorScatter":
            self.begin, self.valid = self.input("write_indices", (batch,), 7), self.input("nonpad", (batch,), 7)
        elif form.kind == "DecoderMaskedMultiHeadAttention":
            self.begin = self.input("past_sequence_length", (1,), TensorProto.INT32)
        elif form.kind == "GroupQueryAttention" and form.counts == "mask":
            mask = self.input("attention_mask", (batch, "total"), 7)
            one = self.integers((1,), "one")
            lengths = self.op("Sub", self.op("ReduceSum", mask, one, keepdims=0), one)
            total = self.op("Gather", self.op("Shape", mask), self.constant(np.array(1), "axis"), axis=0)
            self.last, self.total = (self.op("Cast", n, to=TensorProto.INT32) for n in (lengths, total))
        elif form.kind == "GroupQueryAttention":
            self.last = self.input("seqlens_k", (batch,), TensorProto.INT32)
            self.total = self.input("total_sequence_length", (), TensorProto.INT32)
        if form.has_rotary:
            angles = np.outer(np.arange(PLACES), 100.0 ** -np.linspace(0, 1, SIZE // 2)).astype(np.float32)
            self.turns = [self.constant(np.cos(angles), "cos"), self.constant(np.sin(angles), "sin")]

    def attention(self, parts: Sequence[str], pair: Sequence[str]) -> tuple[str, list[str]]:
        """Append attention; return its result, and the cache with the new rows."""
        form, given = self.form, dict(self.form.inputs)
        attributes: dict[str, Any] = dict(form.attributes)
        if form.kind == "TensorScatter":
            parts, found = [self.split(parts[0], HEADS), *(self.split(p, GROUPS) for p in parts[1:])], []
            for old, new in zip(pair, parts[1:], strict=True):
                found.append(self.op("TensorScatter", old, new, self.begin, axis=2, **_part(attributes, "mode")))
            mixed = self.node(
                "Attention", {0: parts[0], 1: found[0], 2: found[1], 6: self.valid, **given}, 1, attributes
            )
            joined = self.op("Transpose", mixed[0], perm=[0, 2, 1, 3])
            return self.reshape(joined, (0, 0, HEADS * SIZE)), found
        if form.is_packed:
            parts = [self.op("Concat", *parts, axis=-1), "", ""]
        inputs = dict(enumerate(parts))
        if form.kind == "Attention":
            inputs |= {4: pair[0], 5: pair[1]}
            attributes |= {"q_num_heads": HEADS, "kv_num_heads": GROUPS}
        elif form.kind == "GroupQueryAttention":
            inputs |= {3: pair[0], 4: pair[1], 5: self.last, 6: self.total}
            inputs |= {7: self.turns[0], 8: self.turns[1]} if form.has_rotary else {}
            attributes |= {"num_heads": HEADS, "kv_num_heads": GROUPS, "do_rotary": int(form.has_rotary)}
        elif form.kind == "MultiHeadAttention":
            inputs |= {6: pair[0], 7: pair[1]}
            attributes |= {"num_heads": HEADS}
        else:
            inputs |= {5: pair[0], 6: pair[1], 7: self.begin}
            attributes |= {"num_heads": HEADS, "past_present_share_buffer": 1}
        y, *found = self.node(form.kind, inputs | given, 3, attributes)
        return y, found

    def node(self, kind: str, inputs: Mapping[int, Any], count: int, attributes: Mapping[str, Any]) -> list[str]:
        """Append a node whose inputs are given by position; return its outputs."""
        names = ["" for _ in range(max(inputs) + 1)]
        for place, value in inputs.items():
            names[place] = value if isinstance(value, str) else self.constant(value, "given")
        domain = "" if kind == "Attention" else "com.microsoft"
        label = f"{kind}_{len(self._nodes)}"
        outputs = [f"{label}.{i}" for i in range(count)]
        self._nodes.append(onnx.helper.make_node(kind, names, outputs, label, domain=domain, **attributes))
        return outputs

    def split(self, x: str, heads: int) -> str:
        """Append the split of features into heads [batch, heads, rows, size]."""
        return self.op("Transpose", self.reshape(x, (0, 0, heads, SIZE)), perm=[0, 2, 1, 3])


def _part(attributes: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: attributes.pop(name)} if name in attributes else {}
