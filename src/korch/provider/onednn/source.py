"""Prints a call as C++ that creates the oneDNN primitive and runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from korch.provider.onednn.call import CallTensor, Dims, Eltwise, PrimitiveCall

_NAMES = ("x", "w", "y")


def print_source(call: PrimitiveCall, workspace: int, workspace_bytes: int, comment: str) -> str:
    """Return the source, with NAME as the placeholder of the symbol.

    Args:
        call: the primitive; every tensor has a tag or strides.
        workspace: the position of the workspace in the buffers.
        workspace_bytes: its size.
        comment: text for the head of the source.
    """
    body = "\n".join(f"  {line}" for line in _create(call, workspace, workspace_bytes))
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


def _create(call: PrimitiveCall, workspace: int, workspace_bytes: int) -> Iterator[str]:
    has_weights = len(call.tensors) > 2
    names = _NAMES if has_weights else ("x", "y")
    arguments = {"x": "DNNL_ARG_SRC", "w": "DNNL_ARG_WEIGHTS", "y": "DNNL_ARG_DST"}
    for name, tensor in zip(names, call.tensors, strict=True):
        yield f"auto {name} = {_tensor(tensor, arguments[name])};"
    if call.bias is not None:
        yield f"auto bias = {_tensor(call.bias, 'DNNL_ARG_BIAS')};"
    for i, operation in enumerate(call.post):
        if isinstance(operation, Eltwise):
            numbers = f"{_number(operation.alpha)}, {_number(operation.beta)}"
            yield f"make.eltwise(dnnl_eltwise_{operation.kind}, {numbers});"
        else:
            argument = f"DNNL_ARG_ATTR_MULTIPLE_POST_OP({i}) | DNNL_ARG_SRC_1"
            other = _tensor(operation.other, argument)
            yield f"make.binary(dnnl_binary_{operation.kind}, {other});"
    yield f"make.workspace({workspace}, {workspace_bytes});"
    parts = [f"dnnl_{call.algorithm}"] if call.kind == "pooling" else []
    parts += [
        "x",
        *(["w", "bias" if call.bias is not None else "nullptr"] if has_weights else []),
        "y",
        *map(_dims, call.steps),
    ]
    yield f"return make.{call.kind}({', '.join(parts)});"


def _tensor(tensor: CallTensor, argument: str) -> str:
    head = f"{tensor.buffer}, {argument}, {_dims(tensor.dims)}"
    if isinstance(tensor.form, str):
        return f"make.tensor({head}, dnnl_{tensor.form})"
    return f"make.strided({head}, {_dims(tensor.form)})"


def _dims(dims: Dims) -> str:
    return "{" + ", ".join(map(str, dims)) + "}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{float(value)!r}f"
