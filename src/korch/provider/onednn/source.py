"""A call -> the source of a kernel: a table that `korch_onednn.c` reads to create the oneDNN primitive."""

from __future__ import annotations

from korch.provider.onednn.call import CallTensor, Eltwise, PrimitiveCall
from korch.provider.onednn.numbers import ALGORITHMS, TAGS
from korch.tile.llvm.constants import Constants
from korch.tile.llvm.emit import constant

KINDS = ("convolution", "deconvolution", "matmul", "pooling", "reorder")
"""The kinds of primitives; the source has a kind's position."""

X, Y, WEIGHTS, BIAS, SECOND, POST = 1, 17, 33, 41, 2, 32768
"""oneDNN's numbers of the arguments of a primitive: DNNL_ARG_SRC, DST, WEIGHTS, BIAS, SRC_1, and of the first
post-operation."""


def print_source(call: PrimitiveCall, workspace: tuple[int, int], comment: str, isa: str) -> str:
    """Return the source, with NAME as the placeholder of the symbol.

    `workspace`: the position of the workspace in the buffers, and its size in bytes.
    """
    made = Constants(isa)

    def tensor(name: str, tensor: CallTensor, argument: int) -> str:
        tag, strides = 0, "ptr null"
        if isinstance(tensor.form, str):
            tag = TAGS[tensor.form]
        else:
            strides = sizes(f"{name}_strides", tensor.form)
        dims = f"i64 {len(tensor.dims)}, {sizes(f'{name}_dims', tensor.dims)}"
        return made.record(name, [f"i64 {tensor.buffer}, i64 {argument}, {dims}, i64 {tag}, {strides}"])

    def sizes(name: str, values: tuple[int, ...]) -> str:
        return made.numbers(name, [(n,) for n in values]).partition(", ")[2]

    posts = []
    for i, operation in enumerate(call.post):
        if isinstance(operation, Eltwise):
            kind, other = ALGORITHMS[f"eltwise_{operation.kind}"], "ptr null"
            factors = [constant("float", value).typed for value in (operation.alpha, operation.beta)]
        else:
            kind, factors = ALGORITHMS[f"binary_{operation.kind}"], ["float 0.0", "float 0.0"]
            other = tensor(f"other{i}", operation.other, POST * (i + 1) | SECOND)
        posts.append(f"{{ i64 {kind}, {', '.join(factors)}, {other} }}")
    arguments = (X, WEIGHTS, Y) if len(call.tensors) > 2 else (X, Y)
    own = {n: tensor(f"tensor{n}", t, n) for n, t in zip(arguments, call.tensors, strict=True)}
    if call.bias is not None:
        own[BIAS] = tensor("bias", call.bias, BIAS)
    steps = [sizes(f"step{i}", step) for i, step in enumerate(call.steps)] or ["ptr null"] * 4
    if call.kind != "pooling":
        steps.insert(1, "ptr null")
    fields = [
        f"i64 {KINDS.index(call.kind)}, i64 {ALGORITHMS.get(call.algorithm, 0)}",
        *(own.get(n, "ptr null") for n in (X, WEIGHTS, BIAS, Y)),
        made.table("posts", "{ i64, float, float, ptr }", posts),
        *steps,
        f"i64 {workspace[0]}, i64 {workspace[1]}",
    ]
    return made.kernel("korch_onednn", fields, ("create", "run", "destroy"), comment)
