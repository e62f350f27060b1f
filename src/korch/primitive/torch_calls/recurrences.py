"""LSTM, GRU and RNN. PyTorch orders the gates differently from ONNX, and lacks ONNX's default form of GRU."""

from korch.primitive.torch_calls.node import Node, Row

_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""The ONNX positions of the gates in PyTorch's order: input, forget, cell, output; for a GRU: reset, update, new."""

_FUNCTIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
MOST_STEPS = 256
"""The most steps of a GRU that is run as a loop; longer ones run on the host."""


def _recurrence(operator: str) -> Row:
    def text(node: Node) -> str | None:
        way = node.get("direction", "forward")
        count = 2 if way == "bidirectional" else 1
        usual = count * _FUNCTIONS[operator]
        functions = [f.decode() for f in node.get("activations", [])] or usual
        is_relu = operator == "RNN" and functions == count * ["Relu"]
        if not is_relu and functions != usual:
            return None
        if node.get("clip", 0) or node.get("input_forget", 0) or not node.type().size:
            return None
        if node.given(4) or node.given(7):  # lengths of sequences, peepholes
            return None
        is_loop = operator == "GRU" and not node.get("linear_before_reset", 0)
        if is_loop and node.shape()[0] > MOST_STEPS:
            return None
        lines = _begin(node, operator, count)
        if is_loop:
            lines += _loops(node, count, way)
        else:
            lines += _call(node, operator, count, way, is_relu)
        return "\n".join([*lines, "y, *last,"])

    return text


def _begin(node: Node, operator: str, count: int) -> list[str]:
    """Return statements that set the input x and the initial states h and c; the frontend leaves layout 0 only."""
    batch, hidden = node.shape()[1], node.shape(2)[2]
    lines = [f"x = {node.inputs[0]}"]
    for name, i in (("h", 5), ("c", 6)):
        if name == "c" and operator != "LSTM":
            continue
        zeros = f"x.new_zeros({count}, {batch}, {hidden})"
        lines.append(f"{name} = {node.given(i)}" if node.given(i) else f"{name} = {zeros}")
    return lines


def _call(node: Node, operator: str, count: int, way: str, is_relu: bool) -> list[str]:
    """Return statements that call PyTorch's recurrence and set y[steps, directions, batch, hidden] and `last`."""
    hidden, gates = node.shape(2)[2], _ORDER[operator]
    order = ", ".join(f"part[{g}]" for g in gates)
    lines = [
        "def gates(w):",
        f"    part = w.reshape({len(gates)}, {hidden}, -1)",
        f"    return torch.cat(({order},))",
        "weights = []",
    ]
    for d in range(count):
        lines.append(f"weights += [gates({node.inputs[1]}[{d}]), gates({node.inputs[2]}[{d}])]")
        if node.given(3):
            half = len(gates) * hidden
            lines.append(
                f"weights += [gates(b).reshape(-1) for b in "
                f"({node.inputs[3]}[{d}, :{half}], {node.inputs[3]}[{d}, {half}:])]"
            )
    if way == "reverse":
        lines.append("x = x.flip(0)")
    state = "(h.contiguous(), c.contiguous())" if operator == "LSTM" else "h.contiguous()"
    function = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_relu" if is_relu else "rnn_tanh"}
    lines += [
        f"y, *last = torch.{function[operator]}(x, {state}, weights, {bool(node.given(3))}, 1, "
        f"0.0, False, {count == 2}, False)",
        f"y = y.reshape(y.shape[0], y.shape[1], {count}, {hidden}).permute(0, 2, 1, 3)",
    ]
    return [*lines, "y = y.flip(0)"] if way == "reverse" else lines


def _loops(node: Node, count: int, way: str) -> list[str]:
    """Return statements that run a GRU step by step, for the form that applies the reset gate before the product."""
    hidden = node.shape(2)[2]
    w, r = node.inputs[1], node.inputs[2]
    lines = ["ys, last = [], []"]
    for d in range(count):
        is_backward = way == "reverse" or d == 1
        bias = f"{node.inputs[3]}[{d}]" if node.given(3) else f"x.new_zeros({6 * hidden})"
        lines += [
            f"bias, r, state = {bias}, {r}[{d}].transpose(0, 1), h[{d}]",
            f"given = torch.matmul(x, {w}[{d}].transpose(0, 1)) + bias[:{3 * hidden}]",
            f"given = given + bias[{3 * hidden}:]",
            "steps = []",
            f"for now in given{'.flip(0)' if is_backward else ''}:",
            f"    both = torch.sigmoid(now[:, :{2 * hidden}] + torch.matmul(state, r[:, :{2 * hidden}]))",
            f"    update, reset = both[:, :{hidden}], both[:, {hidden}:]",
            f"    new = torch.tanh(now[:, {2 * hidden}:] + torch.matmul(reset * state, r[:, {2 * hidden}:]))",
            "    state = new + update * (state - new)",
            "    steps.append(state)",
            f"ys.append(torch.stack(steps){'.flip(0)' if is_backward else ''})",
            "last.append(state)",
        ]
    return [*lines, "y, last = torch.stack(ys, 1), [torch.stack(last)]"]


ROWS: dict[str, Row] = {name: _recurrence(name) for name in _ORDER}
