"""Arithmetic operators that no primitive covers."""

from korch.primitive.torch_calls.node import WIDE_UNSIGNED, Node, Row, dtype_text


def _running(combine: str, first: str) -> Row:
    def row(node: Node) -> str | None:
        axes = node.numbers(1)
        if axes is None or node.type().dtype in WIDE_UNSIGNED:
            return None
        axis = axes[0] % max(1, node.rank)
        lines = [f"y = {node.inputs[0]}"]
        flip = f"y = y.flip({axis})"
        if node.get("reverse", 0):
            lines.append(flip)
        if node.get("exclusive", 0):
            rest = f"y.narrow({axis}, 0, {max(0, node.shape()[axis] - 1)})"
            begin = f"torch.{first}_like(y.narrow({axis}, 0, {min(1, node.shape()[axis])}))"
            lines.append(f"y = torch.cat(({begin}, {rest}), {axis})")
        lines.append(f"y = torch.{combine}(y, {axis}, dtype=y.dtype)")
        if node.get("reverse", 0):
            lines.append(flip)
        return "\n".join([*lines, "y,"])

    return row


def _determinant(node: Node) -> str:
    return f"torch.linalg.det({node.inputs[0]}),"


def _remainder(node: Node) -> str:
    x, y = node.inputs
    return f"torch.remainder({x}, {y}),"


def _power(node: Node) -> str:
    x, y = node.inputs
    return f"torch.pow({x}.double(), {y}.double()).to({dtype_text(node.result())}),"


def _einsum(node: Node) -> str:
    equation = node.get("equation", "").replace(" ", "")
    return f"torch.einsum({equation!r}, {', '.join(node.inputs)}),"


def _eye(node: Node) -> str:
    rows, columns = node.shape()
    y = f"torch.zeros({rows}, {columns}, dtype={dtype_text(node.result())}, device=x.device)"
    offset = int(node.get("k", 0))
    lines = [f"x = {node.inputs[0]}", f"y = {y}"]
    if -rows < offset < columns:
        lines.append(f"y.diagonal({offset}).fill_(1)")
    return "\n".join([*lines, "y,"])


def _bit_cast(node: Node) -> str:
    return f"{node.inputs[0]}.view({dtype_text(node.result())}),"


ROWS: dict[str, Row] = {
    "BitCast": _bit_cast,
    "CumProd": _running("cumprod", "ones"),
    "CumSum": _running("cumsum", "zeros"),
    "Det": _determinant,
    "Einsum": _einsum,
    "EyeLike": _eye,
    "Mod": _remainder,
    "Pow": _power,
}
