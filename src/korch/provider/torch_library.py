"""cuBLAS and cuDNN through PyTorch's operators: matrix products and convolutions on CUDA devices.

A group consists of a linear primitive, primitives that only move its arguments, and a bias. Moved arguments
are views of tensors, which cost nothing. Images are plain or channels-last, the layouts in which cuDNN is fastest.
"""

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel, TorchCall
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import ReshapeAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.system.content_name import content_name

MOVES = ("transpose", "reshape", "slice")


class TorchProvider:
    """Makes kernels that call PyTorch's operators."""

    name = "torch"
    version = content_version()
    group_shapes = (around("conv", "matmul"),)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer the group in plain layouts, and a convolution of images in channels-last layouts, too."""
        found = _call(group, False)
        if isinstance(found, Refusal):
            return found
        rank = group.output_types[0].rank
        plain = Offer(*group.plain_layouts)
        if "convolution" not in found or rank != 4:
            return (plain,)
        last = Offer(
            tuple(
                channels_last(4).normalized(t.shape) if t.rank == 4 else Layout.plain(t.rank) for t in group.input_types
            ),
            (channels_last(4).normalized(group.output_types[0].shape),),
        )
        return tuple(dict.fromkeys((plain, last)))

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Return a kernel that consists of a Python function with the calls."""
        text = _call(group, not offer.outputs[0].is_plain)
        if isinstance(text, Refusal):
            return text
        head = "".join(f"    # {line}\n" for line in group.text.splitlines())
        arguments = ", ".join(["torch", *(name for name, _ in group.body.inputs)])
        source = f"def NAME({arguments}):\n{head}{text}"
        symbol = content_name("t", source)
        return CudaKernel((TorchCall(symbol, source.replace("NAME", symbol)),))


def _call(group: Group, last: bool) -> str | Refusal:
    """Return the body of the kernel's Python function, or why there is none."""
    body = group.body
    linear = body.linear
    if len(linear) != 1 or linear[0].op not in ("matmul", "conv"):
        return Refusal("it is not one product or convolution")
    root = linear[0]
    if body.types[root.output].dtype not in (DType.F32, DType.F16, DType.BF16, DType.F64):
        return Refusal("the elements are not floats")
    if len(body.outputs) != 1:
        return Refusal("it has several outputs")
    names = {value: name for name, value in body.inputs}
    lines: list[str] = []
    bias: str | None = None
    after = False
    result = root.output
    for primitive in body.primitives:
        if primitive is root:
            after = True
            continue
        if primitive.op == "round_tf32" and not after and primitive.inputs[0] in names:
            names[primitive.output] = names[primitive.inputs[0]]  # the library rounds factors itself
            continue
        if primitive.op in MOVES and not after and primitive.inputs[0] in names:
            names[primitive.output] = f"x{primitive.output}"
            lines.append(f"x{primitive.output} = {_moved(primitive, names[primitive.inputs[0]])}")
            continue
        if primitive.op in ("broadcast", "add") and bias is None:
            continue
        return Refusal(f"{primitive.op} is not part of a library's call")
    added = [p for p in body.primitives if p.op == "add"]
    if added:
        found = _bias(group, root, added)
        if found is None:
            return Refusal("the added value is not a bias")
        bias, result = names[found[0]], found[1]
    elif any(p.op == "broadcast" for p in body.primitives):
        return Refusal("a broadcast is not part of a library's call")
    if body.outputs[0][1] != result or any(v not in names for v in root.inputs):
        return Refusal("the result of the library is not the output")
    called = _linear(root, [names[v] for v in root.inputs], bias)
    lines.append(f"y = {called}")
    form = "torch.channels_last" if last else "torch.contiguous_format"
    lines.append(f"return y.contiguous(memory_format={form}),")
    return "".join(f"    {line}\n" for line in lines)


def _bias(group: Group, root: Primitive, added: Sequence[Primitive]) -> tuple[int, int] | None:
    """Return the value of the bias vector that is added along a product's channels, and the value of the sum."""
    body = group.body
    if len(added) != 1 or root.output not in added[0].inputs:
        return None
    other = next(v for v in added[0].inputs if v != root.output)
    spread = [p for p in body.primitives if p.output == other and p.op == "broadcast"]
    if len(spread) != 1 or len(body.primitives) != 3 + sum(p.op in (*MOVES, "round_tf32") for p in body.primitives):
        return None
    value = spread[0].inputs[0]
    if value not in {v for _, v in body.inputs}:
        return None
    shape, out = body.types[value].shape, body.types[root.output].shape
    axis = len(out) - 1 if root.op == "matmul" else 1
    padded = (1,) * (len(out) - len(shape)) + shape
    is_vector = all(n == (out[a] if a == axis else 1) for a, n in enumerate(padded))
    is_plain = root.op != "matmul" or len(out) == 2
    return (value, added[0].output) if is_vector and is_plain else None


def _moved(primitive: Primitive, name: str) -> str:
    match primitive.attributes:
        case TransposeAttributes(perm):
            return f"{name}.permute({list(perm)})"
        case ReshapeAttributes(shape):
            return f"{name}.reshape({list(shape)})"
        case SliceAttributes(start, size, step):
            parts = ", ".join(f"{s}:{s + (n - 1) * k + 1}:{k}" for s, n, k in zip(start, size, step, strict=True))
            return f"{name}[{parts}]"
    raise AssertionError(f"{primitive.op} is no move")


def _linear(root: Primitive, names: Sequence[str], bias: str | None) -> str:
    match root.attributes:
        case ConvAttributes(strides, begin, end, dilations, groups):
            x, pads = names[0], list(begin)
            if begin != end:  # the library pads both sides equally
                around = [n for pair in zip(begin[::-1], end[::-1], strict=True) for n in pair]
                x, pads = f"torch.nn.functional.pad({x}, {around})", [0] * len(begin)
            vector = f"{bias}.reshape(-1)" if bias else "None"
            return (
                f"torch.convolution({x}, {names[1]}, {vector}, {list(strides)}, {pads}, "
                f"{list(dilations)}, False, {[0] * len(begin)}, {groups})"
            )
    if bias:
        return f"torch.addmm({bias}.reshape(-1), {names[0]}, {names[1]})"
    return f"torch.matmul({names[0]}, {names[1]})"
