"""Match and layouts -> C++ that makes the oneDNN primitive and runs it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from korch.candidate.candidate import Group, Offer
from korch.candidate.layout import Layout
from korch.provider.onednn.geometry import conv_steps, conv_weights, operand, tag_for
from korch.provider.onednn.match import Binary, Eltwise, Match


def print_source(group: Group, found: Match, offer: Offer, comment: str) -> str:
    """Return the source, with NAME where the symbol is to stand."""
    lines = _Lines(group, found, offer)
    body = "\n".join(f"  {line}" for line in lines.create())
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    return f"""{head}#include "korch_onednn.h"

extern "C" void* NAME_create(int, char* error, size_t error_size) {{
  korch_onednn::Builder make(error, error_size);
{body}
}}

extern "C" int NAME_run(void* state, void* const* buffers) {{
  return korch_onednn::run(state, buffers);
}}

extern "C" void NAME_destroy(void* state) {{ korch_onednn::destroy(state); }}
"""


class _Lines:
    def __init__(self, group: Group, found: Match, offer: Offer) -> None:
        self.group = group
        self.found = found
        self.offer = offer
        self.output = len(group.inputs)

    def create(self) -> Iterable[str]:
        found = self.found
        yield self._tensor("x", "DNNL_ARG_SRC", found.inputs[0])
        if len(found.inputs) > 1:
            yield self._weights()
        if found.bias is not None:
            yield self._bias()
        yield self._output()
        for i, operation in enumerate(found.post):
            yield from self._post(i, operation)
        yield f"return {self._call()};"

    def _post(self, i: int, operation: Eltwise | Binary) -> Iterable[str]:
        if isinstance(operation, Eltwise):
            numbers = f"{_number(operation.alpha)}, {_number(operation.beta)}"
            yield f"make.eltwise(dnnl_eltwise_{operation.kind}, {numbers});"
            return
        argument = "DNNL_ARG_ATTR_MULTIPLE_POST_OP(make.post_operation()) | DNNL_ARG_SRC_1"
        layout = self.offer.inputs[operation.input]
        if len(layout.order) != len(operation.dims):
            layout = Layout.plain(len(operation.dims))
        tag = f"dnnl_{layout}"
        other = f"make.tensor({operation.input}, {argument}, {_dims(operation.dims)}, {tag})"
        yield f"make.binary(dnnl_binary_{operation.kind}, {other});"

    def _tensor(self, name: str, argument: str, position: int) -> str:
        shape = self.group.input_types[position].shape
        if self.found.op == "matmul":
            return self._operand(name, argument, position, self.found.transposed[0])
        tag = f"dnnl_{self.offer.inputs[position]}"
        return f"auto {name} = make.tensor({position}, {argument}, {_dims(shape)}, {tag});"

    def _operand(self, name: str, argument: str, position: int, is_transposed: bool) -> str:
        shape = self.group.input_types[position].shape
        layout = self.offer.inputs[position]
        if not layout.is_plain:
            tag = f"dnnl_{layout}"
            return f"auto {name} = make.tensor({position}, {argument}, {_dims(shape)}, {tag});"
        dims, strides = operand(shape, is_transposed)
        return (f"auto {name} = make.strided({position}, {argument}, {_dims(dims)}, "
                f"{_dims(strides)});")  # fmt: skip

    def _weights(self) -> str:
        position = self.found.inputs[1]
        if self.found.op == "matmul":
            return self._operand("w", "DNNL_ARG_WEIGHTS", position, self.found.transposed[1])
        layout = self.offer.inputs[position]
        _, dims, plain = conv_weights(self.found, self.group.input_types[position].shape)
        tag = plain if layout.is_plain else tag_for(layout, len(dims))
        return f"auto w = make.tensor({position}, DNNL_ARG_WEIGHTS, {_dims(dims)}, dnnl_{tag});"

    def _bias(self) -> str:
        position = self.found.bias or 0
        size = math.prod(self.group.input_types[position].shape)
        if self.found.op != "matmul":
            return f"auto bias = make.tensor({position}, DNNL_ARG_BIAS, {{{size}}}, dnnl_a);"
        rank = self.group.output_types[0].rank
        dims, tag = (1,) * (rank - 1) + (size,), f"dnnl_{Layout.plain(rank)}"
        return f"auto bias = make.tensor({position}, DNNL_ARG_BIAS, {_dims(dims)}, {tag});"

    def _output(self) -> str:
        shape = self.group.output_types[0].shape
        tag = f"dnnl_{self.offer.outputs[0]}"
        return f"auto y = make.tensor({self.output}, DNNL_ARG_DST, {_dims(shape)}, {tag});"

    def _call(self) -> str:
        found = self.found
        attributes: Any = found.primitive.attributes if found.primitive is not None else None
        bias = "bias" if found.bias is not None else "nullptr"
        match found.op:
            case "conv" | "conv_transpose":
                name = "convolution" if found.op == "conv" else "deconvolution"
                return f"make.{name}(x, w, {bias}, y, {', '.join(map(_dims, conv_steps(found)))})"
            case "matmul":
                return f"make.matmul(x, w, {bias}, y)"
            case "reorder":
                return "make.reorder(x, y)"
        kind = "max" if found.op == "pool_max" else "avg_include_padding"
        steps = (attributes.strides, attributes.kernel, tuple(d - 1 for d in attributes.dilations),
                 attributes.pads_begin, attributes.pads_end)  # fmt: skip
        return f"make.pooling(dnnl_pooling_{kind}, x, y, {', '.join(map(_dims, steps))})"


def _dims(dims: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, dims)) + "}"


def _number(value: float) -> str:
    return f"{float(value)!r}f"
