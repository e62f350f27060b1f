"""Models with loops: a number of iterations that is known, and everything that the operators allow."""

import numpy as np
import onnx

HEAD = '<ir_version: 9, opset_import: ["": 18]> '
CONSTANTS = (
    "<int64 most = {40}, int64 none = {0}, int64 one = {1}, bool yes = {1}, bool no = {0}, int64[1] last = {1},"
    " float half = {0.5}, float eighth = {0.125}, float[3] weights = {0.5, -0.25, 1}>"
)


def scan(body: str, ends: str = "", attributes: str = "num_scan_inputs = 1", inputs: str = "s0, x") -> str:
    """Return the text of a model of one Scan with the state s0 and the input x."""
    ends = ends or "(float[2,3] s0, float[40,2,3] x, float[3] w) => (float[2,3] s, float[40,2,3] y)"
    return f"{HEAD} g {ends} {CONSTANTS} {{ s, y = Scan <{attributes}, body = b {body}> ({inputs}) }}"


def loop(nodes: str, most: str = "most", condition: str = "yes", results: str = "(bool d, float[2,3] b)") -> str:
    """Return the text of a model of one Loop with the state a, which becomes s."""
    body = f"b (int64 i, bool c, float[2,3] a) => {results} {{ {nodes} }}"
    more = ", y" if results.count(",") > 2 else ""
    ends = "(float[2,3] s0, float[2,44,3] x, float[3] w) => (float[2,3] s" + (", float[?,2,3] y)" if more else ")")
    return f"{HEAD} g {ends} {CONSTANTS} {{ s{more} = Loop <body = {body}> ({most}, {condition}, s0) }}"


STEP = "(float[2,3] a, float[2,3] v) => (float[2,3] b, float[2,3] u) "
GOES_ON = "d = Identity(c) "
TWO = "(bool d, float[2,3] b, float[2,3] u)"

MODELS = {
    "scan": scan(STEP + "{ p = Mul(a, w) b = Add(p, v) u = Tanh(b) }"),
    "invariant": scan(STEP + "{ e = Exp(w) k = Mul(e, weights) p = Mul(a, k) b = Add(p, v) u = Neg(b) }"),
    "backward": scan(
        STEP + "{ p = Mul(a, half) b = Add(p, v) u = Sub(b, w) }",
        attributes="num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1]",
    ),
    "axes": scan(
        STEP + "{ p = Mul(a, half) b = Add(p, v) u = Sub(b, w) }",
        "(float[2,3] s0, float[2,40,3] x, float[3] w) => (float[2,3] s, float[2,3,40] y)",
        "num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1]",
    ),
    "product": scan(
        "(float[2,3] a, float[2,4] v) => (float[2,3] b, float[2,3] u)"
        "{ p = MatMul(v, m) q = Mul(a, half) r = Add(p, q) b = Tanh(r) u = Identity(b) }",
        "(float[2,3] s0, float[40,2,4] x, float[4,3] m) => (float[2,3] s, float[40,2,3] y)",
    ),
    "shift": scan(STEP + "{ b = Identity(v) u = Identity(a) }"),
    "constant": scan(
        "(float[3] a, float[3] v) => (float[3] b, float[3] u) { b = Identity(weights) u = Add(a, v) }",
        "(float[3] s0, float[40,3] x) => (float[3] s, float[40,3] y)",
    ),
    "short": scan(
        STEP + "{ b = Add(a, v) u = Mul(b, w) }",
        "(float[2,3] s0, float[2,2,3] x, float[3] w) => (float[2,3] s, float[2,2,3] y)",
    ),
    "single": scan(
        STEP + "{ b = Add(a, v) u = Mul(b, w) }",
        "(float[2,3] s0, float[1,2,3] x, float[3] w) => (float[2,3] s, float[1,2,3] y)",
    ),
    "loop": loop(GOES_ON + "v = Gather <axis = 1> (x, i) p = Mul(a, w) b = Add(p, v) u = Neg(a)", results=TWO),
    "number": loop(GOES_ON + "n = Cast <to = 1> (i) p = Mul(a, half) b = Add(p, n) u = Mul(w, b)", results=TWO),
    "no iteration": loop(GOES_ON + "b = Add(a, w) u = Neg(a)", most="none", results=TWO),
    "false at the start": loop(GOES_ON + "b = Add(a, w)", condition="no"),
    "false at once": loop("d = Identity(no) b = Add(a, w) u = Neg(a)", results=TWO),
    "ends itself": loop("d = Not(c) b = Add(a, w)", most=""),
    "swap": f"{HEAD} g (float[2] p, float[2] q, float[2] x) => (float[2] r, float[2] s) {CONSTANTS} {{ r, s = Loop "
    "<body = b (int64 i, bool c, float[2] e, float[2] f) => (bool d, float[2] k, float[2] l)"
    "{ d = Identity(c) k = Add(f, x) l = Identity(e) }> (most, yes, p, q) }",
    "several": f"{HEAD} g (float[2] p, float[2] q, float[40,2] x) => (float[2] r, float[2] s, float[40,2] y) "
    f"{CONSTANTS} {{ r, s, y = Scan <num_scan_inputs = 1, body = b (float[2] e, float[2] f, float[2] v) => "
    "(float[2] k, float[2] l, float[2] u) { k = Mul(f, half) n = Add(v, f) l = Tanh(n) u = Add(k, l) }> (p, q, x) }",
    "nested": scan(
        STEP
        + "{ b = Loop <body = n (int64 j, bool c, float[2,3] e) => (bool d, float[2,3] h)"
        + "{ d = Identity(c) k = Mul(e, half) h = Add(k, v) }> (most, yes, a) u = Neg(b) }"
    ),
    "operator that is kept": scan(
        STEP + "{ p = Add(a, v) k = Shape(p) n = Gather(k, last) b, z = TopK(p, n) u = Identity(b) }"
    ),
}
"""Models by name. Their results do not overflow."""


def loop_model(name: str) -> onnx.ModelProto:
    """Return one of the models."""
    return onnx.parser.parse_model(MODELS[name])


def loop_inputs(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return seeded random inputs of a model."""
    rng = np.random.default_rng(0)
    shapes = {item.name: [d.dim_value for d in item.type.tensor_type.shape.dim] for item in model.graph.input}
    return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
