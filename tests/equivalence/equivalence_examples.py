"""Examples for each rule: graphs to which it applies, and for each condition a graph that it refuses."""

from tests.equivalence import quantized_examples


def window(rank: int = 2, **attributes: object) -> str:
    """Return the text of attributes of a convolution or a pool; by default it has no strides, pads or dilations."""
    ones, zeros = (1,) * rank, (0,) * rank
    fields = {"strides": ones, "pads_begin": zeros, "pads_end": zeros, "dilations": ones, **attributes}
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def conv(x: str, w: str, out: str, between: str = "", **attributes: object) -> str:
    """Return the text of conv(x, w), x being %0 or what `between` computes into %2."""
    text = window(x.count(",") - 1, **{"groups": 1, **attributes})
    data, result = ("%2", "%3") if between else ("%0", "%2")
    return (
        f'graph(%0 "x": f64[{x}]) -> ({result} "y")\n%1: f64[{w}] = constant {{digest=1f}}\n'
        f"{between}{result}: f64[{out}] = conv({data}, %1) {{{text}}}\n"
    )


def of_bytes(text: str) -> str:
    """Return the text of a convolution with an image and weights of bytes, and sums of 32 bits."""
    for dtype in ("u8", "i8", "i32"):
        text = text.replace("f64", dtype, 1)
    return text


def divide(divisor: str, dtype: str = "f64", shape: str = "2,3") -> str:
    kind = f"{dtype}[{shape}]"
    return f'graph(%0 "x": {kind}) -> (%2 "y")\n%1: {kind} = constant {{{divisor}}}\n%2: {kind} = div(%0, %1)\n'


def unary(x: str, *lines: str) -> str:
    body = "".join(f"%{i}: {line}\n" for i, line in enumerate(lines, 1))
    return f'graph(%0 "x": {x}) -> (%{len(lines)} "y")\n{body}'


def pad(shape: str, before: object, after: object, rest: str = "") -> str:
    return f"%2: f64[{shape}] = pad(%0) {{before={before}, after={after}{rest}}}\n"


AFTER = "f64[1,4,3,3] = conv(%0, %1) {strides=(1,1), pads_begin=(0,0), pads_end=(0,0), dilations=(1,1), groups=1}"
WEIGHTS = "f64[4,2,2,2] = constant {digest=1f}"
BEFORE = "f64[1,3,4,4] = conv(%2, %3) {strides=(1,1), pads_begin=(P,P), pads_end=(P,P), dilations=(1,1), groups=1}"


def after(constant: str, op: str, *more: str, x: str = "f64[1,2,4,4]") -> str:
    return unary(x, WEIGHTS, AFTER, f"f64[1,4,3,3] = constant {{{constant}}}", f"f64[1,4,3,3] = {op}(%2, %3)", *more)


def before(constant: str, op: str, padding: int) -> str:
    kernel = 1 + 2 * padding
    return unary(
        "f64[1,2,4,4]",
        f"f64[1,2,4,4] = constant {{{constant}}}",
        f"f64[1,2,4,4] = {op}(%0, %1)",
        f"f64[3,2,{kernel},{kernel}] = constant {{digest=1f}}",
        BEFORE.replace("P", str(padding)),
    )


def of_tiny_weights(text: str) -> str:
    return text.replace("f64", "f32").replace("digest=1f", "uniform=1e-25")


OUT_OF_RANGE = [
    ("f32", "mul", "1e30", "mul"),
    ("f32", "mul", "1e-30", "mul"),
    ("f32", "div", "1e-25", "div"),
    ("f32", "add", "1e38", "mul"),
    ("f16", "mul", "300.0", "mul"),
    ("f64", "mul", "1e-200", "mul"),
    ("f64", "mul", "'inf'", "mul"),
]
"""Two steps by one number of which one scale and shift would overflow or underflow."""


def step_twice(dtype: str, first: str, number: str, second: str) -> str:
    kind = f"{dtype}[2,3]"
    lines = (f"constant {{uniform={number}}}", f"{first}(%0, %1)", f"{second}(%2, %1)")
    return unary(kind, *(f"{kind} = {line}" for line in lines))


def pool(k: int, p: int, x: str = "f64[1,2,9,9]", more: str = "", **attributes: object) -> str:
    text = window(**{"kernel": (k, k), "pads_begin": (p, p), "pads_end": (p, p), **attributes})
    return f"pool_max(%0) {{{text}}}"


def two_pools(first: str, second: str, out: str = "1,2,9,9") -> str:
    """Return the text of two pools of one image, added."""
    return unary(
        "f64[1,2,9,9]",
        f"f64[1,2,9,9] = {first}",
        f"f64[{out}] = {second}",
        *([f"f64[{out}] = add(%1, %2)"] if out == "1,2,9,9" else ["f64[1,2,9,9] = neg(%1)"]),
    ).replace('(%3 "y")', '(%3 "y", %2 "z")')


def product(a: str, b: str, c: str, first: str, out: str, left: bool = True, kind: str = "f64") -> str:
    """Return the text of (a b) c or a (b c)."""
    inner, outer = ("(%0, %1)", "(%3, %2)") if left else ("(%1, %2)", "(%0, %3)")
    return (
        f'graph(%0 "a": {kind}[{a}], %1 "b": {kind}[{b}], %2 "c": {kind}[{c}]) -> (%4 "y")\n'
        f"%3: {kind}[{first}] = matmul{inner}\n%4: {kind}[{out}] = matmul{outer}\n"
    )


def focus(
    weights: str = "constant {digest=1f}",
    starts: str = "00 10 01 11",
    step: str = "1,1,2,2",
    x: str = "1,2,6,6",
    **attributes: object,
) -> str:
    """Return the text of a convolution of four slices of an image."""
    lines = [
        f"f64[1,2,3,3] = slice(%0) {{start=(0,0,{i},{j}), size=(1,2,3,3), step=({step})}}" for i, j in starts.split()
    ]
    text = window(**{"pads_begin": (1, 1), "pads_end": (1, 1), "groups": 1, **attributes})
    groups, out = int(str(attributes.get("groups", 1))), "1,4,3,3"
    return unary(
        f"f64[{x}]",
        *lines,
        "f64[1,8,3,3] = concat(%1, %2, %3, %4) {axis=1}",
        f"f64[4,{8 // groups},3,3] = {weights}",
        f"f64[{out}] = conv(%5, %6) {{{text}}}",
    )


FOCUS_OF_THREE = unary(
    "f64[1,2,6,6]",
    *(
        f"f64[1,2,3,3] = slice(%0) {{start=(0,0,{i},{j}), size=(1,2,3,3), step=(1,1,2,2)}}"
        for i, j in ("00", "10", "01")
    ),
    "f64[1,6,3,3] = concat(%1, %2, %3) {axis=1}",
    "f64[4,6,3,3] = constant {digest=1f}",
    f"f64[1,4,3,3] = conv(%4, %5) {{{window(pads_begin=(1, 1), pads_end=(1, 1), groups=1)}}}",
)


def siblings(count: int, op: str = "conv", groups: int = 1) -> str:
    """Return the text of several linear primitives of one tensor."""
    lines, outs = [], []
    for i in range(count):
        w, y = 1 + 2 * i, 2 + 2 * i
        if op == "conv":
            lines += [
                f"%{w}: f64[{2 + 2 * (i % 2)},{4 // groups},1,1] = constant {{digest={i + 1:x}f}}",
                f"%{y}: f64[1,{2 + 2 * (i % 2)},3,3] = conv(%0, %{w}) {{strides=(1,1), "
                f"pads_begin=(0,0), pads_end=(0,0), dilations=(1,1), groups={groups}}}",
            ]
        else:
            lines += [
                f"%{w}: f64[3,{i + 1}] = constant {{digest={i + 1:x}f}}",
                f"%{y}: f64[4,{i + 1}] = matmul(%0, %{w})",
            ]
        outs.append(f'%{y} "y{i}"')
    x = "1,4,3,3" if op == "conv" else "4,3"
    return f'graph(%0 "x": f64[{x}]) -> ({", ".join(outs)})\n' + "\n".join(lines) + "\n"


def grown(kind: str, step: str, out: str = "", rows: str = "4") -> str:
    """Return the text of a step of values that are broadcast."""
    return (
        f'graph(%0 "a": {kind}[{rows}], %1 "b": {kind}[1,3,1]) -> (%5 "y")\n'
        f"%2: {kind}[2,3,4] = broadcast(%0) {{shape=(2,3,4)}}\n"
        f"%3: {kind}[2,3,4] = broadcast(%1) {{shape=(2,3,4)}}\n"
        f"%4: {kind}[2,3,4] = constant {{uniform={'True' if kind == 'bool' else '2.0'}}}\n"
        f"%5: {out or kind}[2,3,4] = {step}\n"
    )


def outer(a: str, b: str, axes: str, out: str, full: str = "3,2,4", kind: str = "f64") -> str:
    """Return the text of a sum of products of two broadcasts."""
    return (
        f'graph(%0 "a": {kind}[{a}], %1 "b": {kind}[{b}]) -> (%5 "y")\n'
        f"%2: {kind}[{full}] = broadcast(%0) {{shape=({full})}}\n"
        f"%3: {kind}[{full}] = broadcast(%1) {{shape=({full})}}\n"
        f"%4: {kind}[{full}] = mul(%2, %3)\n"
        f"%5: {kind}[{out}] = reduce_sum(%4) {{axes=({axes},)}}\n"
    )


def rows(axis: int = 1, kind: str = "f64") -> str:
    """Return the text of the sum of a matrix that is multiplied, too."""
    out = "3,1" if axis else "1,4"
    return (
        f'graph(%0 "a": {kind}[3,4], %1 "b": {kind}[4,5]) -> (%2 "y", %3 "z")\n'
        f"%2: {kind}[{out}] = reduce_sum(%0) {{axes=({axis},)}}\n"
        f"%3: {kind}[3,5] = matmul(%0, %1)\n"
    )


def scaled(
    step: str = "div(%0, %3)",
    *,
    scale: str = "4,1",
    side: int = 0,
    is_turned: bool = False,
    n: int = 5,
    kind: str = "f64",
    constant: str = "",
) -> str:
    """Return the text of a product with an operand of 4 times 6 that is scaled before, perhaps transposed."""
    last = 6 if is_turned else 5
    turned = f"%5: {kind}[6,4] = transpose(%4) {{perm=(1,0)}}\n" if is_turned else ""
    rows, columns = (6, 4) if is_turned else (4, 6)
    left, right = ((rows, columns), (columns, n)) if side == 0 else ((n, rows), (rows, columns))
    other = right if side == 0 else left
    value = "%5" if is_turned else "%4"
    product = f"({value}, %1)" if side == 0 else f"(%1, {value})"
    given = "" if constant else f', %2 "r": {kind}[{scale}]'
    return (
        f'graph(%0 "x": {kind}[4,6], %1 "w": {kind}[{other[0]},{other[1]}]{given}) -> (%{last} "y")\n'
        + (f"%2: {kind}[{scale}] = constant {{{constant}}}\n" if constant else "")
        + f"%3: {kind}[4,6] = broadcast(%2) {{shape=(4,6)}}\n%4: {kind}[4,6] = {step}\n{turned}"
        f"%{last}: {kind}[{left[0]},{right[1]}] = matmul{product}\n"
    )


def joined(count: int = 2, m: int = 40, at: int = 1, constant: bool = False) -> str:
    """Return the text of products of one m x 4 matrix, or of its transpose, with several inputs."""
    shape, out = (lambda n: f"4,{n}", lambda n: f"{m},{n}") if at == 1 else (lambda n: f"{n},4", lambda n: f"{n},{m}")
    names = range(1, count + 1)
    given = "".join(f', %{i} "w{i}": f64[{shape(i)}]' for i in names if not (constant and i == 1))
    lines = "%1: f64[" + shape(1) + "] = constant {digest=1f}\n" if constant else ""
    for i in names:
        operands = f"(%0, %{i})" if at == 1 else f"(%{i}, %0)"
        lines += f"%{count + i}: f64[{out(i)}] = matmul{operands}\n"
    outs = ", ".join(f'%{count + i} "y{i}"' for i in names)
    return f'graph(%0 "x": f64[{f"{m},4" if at == 1 else f"4,{m}"}]{given}) -> ({outs})\n{lines}'


POOLED = "{kernel=(2,2), strides=(2,2), pads_begin=P, pads_end=(0,0), dilations=(1,1)}"


def pooled(
    out: str = "1,3,2,2",
    w: str = "3,2,1,1",
    y: str = "1,3,4,4",
    more: str = "",
    sum_: str = f"pool_sum(%2) {POOLED}",
    pad: int = 0,
    shift: str = "",
) -> str:
    """Return the text of sums of a convolution's results, shifted or not."""
    last = 3 + 2 * bool(shift)
    lines = f"%3: f64[{y}] = {shift}\n%4: f64[{y}] = add(%2, %3)\n" if shift else ""
    text = sum_.replace("%2", f"%{last - 1}").replace("P", f"({pad},{pad})")
    return conv("1,2,4,4", w, y).replace('(%2 "y")', f'(%{last} "y"{more})') + (
        f"{lines}%{last}: f64[{out}] = {text}\n"
    )


SHIFT = "constant {uniform=2.0}"


def gate(kind: str = "f64") -> str:
    """Return the text of tanh(max(x, 0) + log(1 + e^-|x|))."""
    t = f"{kind}[2,3]"
    return unary(
        t,
        f"{t} = constant {{uniform=0.0}}",
        f"{t} = max(%0, %1)",
        f"{t} = abs(%0)",
        f"{t} = neg(%3)",
        f"{t} = exp(%4)",
        f"{t} = constant {{uniform=1.0}}",
        f"{t} = add(%5, %6)",
        f"{t} = log(%7)",
        f"{t} = add(%2, %8)",
        f"{t} = tanh(%9)",
    )


def tokens(kind: str = "f64") -> str:
    """Return the text of x² · 2 of the tokens of an image."""
    flat, rows = f"{kind}[1,2,4]", f"{kind}[1,4,2]"
    return unary(
        f"{kind}[1,2,2,2]",
        f"{flat} = reshape(%0) {{shape=(1,2,4)}}",
        f"{rows} = transpose(%1) {{perm=(0,2,1)}}",
        f"{rows} = mul(%2, %2)",
        f"{rows} = constant {{uniform=2{'' if kind == 'i32' else '.0'}}}",
        f"{rows} = mul(%3, %4)",
    )


APPLIES: dict[str, tuple[str, ...]] = {
    "transposes-compose": (
        unary("f64[2,1,3]", "f64[3,2,1] = transpose(%0) {perm=(2,0,1)}", "f64[1,3,2] = transpose(%1) {perm=(2,0,1)}"),
        unary(
            "f64[2,3]",
            "f64[3,2] = transpose(%0) {perm=(1,0)}",
            "f64[2,3] = transpose(%1) {perm=(1,0)}",
            "f64[2,3] = exp(%2)",
        ),
    ),
    "reshapes-compose": (
        unary("f64[2,6]", "f64[3,4] = reshape(%0) {shape=(3,4)}", "f64[12] = reshape(%1) {shape=(12,)}"),
        unary(
            "f64[2,6]",
            "f64[3,4] = reshape(%0) {shape=(3,4)}",
            "f64[2,6] = reshape(%1) {shape=(2,6)}",
            "f64[2,6] = exp(%2)",
        ),
    ),
    "broadcasts-compose": (
        unary("f64[3,1]", "f64[3,4] = broadcast(%0) {shape=(3,4)}", "f64[2,3,4] = broadcast(%1) {shape=(2,3,4)}"),
    ),
    "affine-steps-compose": (
        unary("f64[2,3]", "f64[2,3] = constant {uniform=2.0}", "f64[2,3] = mul(%0, %1)", "f64[2,3] = neg(%2)"),
        unary("f64[2,3]", "f64[2,3] = constant {uniform=1.0}", "f64[2,3] = mul(%0, %1)", "f64[2,3] = exp(%2)"),
    ),
    "div-by-power-of-two-is-mul": (divide("elements=[2.0, 0.5, -8.0, 1.0, 4.0, 0.25]"), divide("uniform=8.0", "f16")),
    "div-by-constant-is-mul": (divide("uniform=3.0", shape="32,32"), divide("digest=1f", shape="32,32")),
    "scale-folds-into-linear-before-it": (
        after("uniform=3.0", "mul"),
        after("uniform=3.0", "div"),
        after("uniform=3.0", "add", "f64[1,4,3,3] = neg(%4)"),
    ),
    "affine-folds-into-linear-after-it": (before("uniform=3.0", "mul", 1), before("uniform=3.0", "add", 0)),
    "conv1x1-is-matmul": (conv("1,3,4,5", "2,3,1,1", "1,2,4,5"), conv("1,3,1", "2,3,1", "1,2,1")),
    "conv-of-patches-is-matmul": (
        conv("2,3,4,6", "5,3,2,3", "2,5,2,2", strides=(2, 3)),
        conv("1,3,8", "2,3,4", "1,2,2", strides=(4,)),
    ),
    "zero-pad-folds-into-conv": (
        conv(
            "1,1,4,4",
            "1,1,3,3",
            "1,1,6,4",
            pad("1,1,7,4", (0, 0, 2, 0), (0, 0, 1, 0)),
            pads_begin=(0, 1),
            pads_end=(1, 1),
        ),
    ),
    "few-channel-conv-is-row-conv": (
        conv("1,3,6,5", "2,3,3,2", "1,2,4,4"),
        conv("1,3,6,7", "2,3,3,2", "1,2,6,3", strides=(1, 2), pads_begin=(1, 0), pads_end=(1, 0)),
    ),
    "conv3x3-is-winograd": (
        conv("1,16,9,8", "16,16,3,3", "1,16,8,7", pads_begin=(0, 1), pads_end=(1, 0)),
        conv("2,17,13,13", "16,17,3,3", "2,16,13,13", pads_begin=(1, 1), pads_end=(1, 1)),
        of_bytes(conv("1,17,9,8", "16,17,3,3", "1,16,8,7", pads_begin=(0, 1), pads_end=(1, 0))),
    ),
    "pool-is-one-axis-after-another": (
        unary("f64[1,2,9,9]", f"f64[1,2,9,9] = {pool(5, 2)}"),
        unary(
            "f64[1,2,9,9]",
            "f64[1,2,5,3] = pool_max(%0) {kernel=(3,4), strides=(2,3), "
            "pads_begin=(1,0), pads_end=(1,1), dilations=(1,1)}",
        ),
    ),
    "large-pool-is-pool-of-small-pool": (
        two_pools(pool(5, 2), pool(9, 4)),
        two_pools(pool(3, 1), pool(6, 2, strides=(2, 2)), "1,2,4,4"),
    ),
    "matmul-chain-in-its-cheaper-order": (
        product("9,2", "2,9", "9,2", "9,9", "9,2"),
        product("2,2,9", "2,9,2", "2,2,9", "2,9,9", "2,2,9", left=False),
    ),
    "conv-of-slices-is-strided-conv": (
        focus(),
        focus(starts="11 00 10 01", strides=(2, 1)).replace("1,4,3,3] = conv", "1,4,2,3] = conv"),
    ),
    "sum-of-products-is-matmul": (outer("3,1,4", "2,4", "2", "3,2,1"), outer("3,2,1", "3,1,4", "0", "1,2,4")),
    "sum-is-matmul-with-ones": (rows(),),
    "row-scale-moves-behind-matmul": (
        scaled(),
        scaled("mul(%3, %0)"),
        scaled(scale="6", side=1),
        scaled(side=1, is_turned=True),
        scaled(scale="1,6", is_turned=True),
    ),
    "computed-siblings-are-one-matmul": (joined(), joined(3, at=0), joined(constant=True)),
    "sum-of-linear-is-linear-of-sum": (
        pooled(),
        pooled(shift=SHIFT),
        pooled("1,3,1,1", sum_="reduce_sum(%2) {axes=(2,3)}", shift=SHIFT),
    ),
    "tanh-of-softplus-is-a-quotient": (gate(),),
    "steps-come-before-the-move": (tokens(),),
    "steps-come-before-the-broadcast": (grown("f64", "mul(%2, %3)"), grown("f64", "add(%2, %4)")),
    "siblings-are-one-linear": (siblings(3), siblings(2, "matmul")),
    "channel-map-moves-to-its-cheapest-place": (
        conv("1,2,4,4", "1,2,1,1", "1,1,8,4", "%2: f64[1,2,8,4] = take(%0) {axis=2, indices=(0,0,1,1,2,2,3,3)}\n"),
        unary(
            "f64[5,4]",
            "f64[4,3] = constant {digest=1f}",
            "f64[5,3] = matmul(%0, %1)",
            "f64[3,2] = constant {digest=2f}",
            "f64[5,2] = matmul(%2, %3)",
        ),
    ),
}

FIRING: tuple[tuple[str, str], ...] = (
    *((rule, text) for rule, texts in (APPLIES | quantized_examples.APPLIES).items() for text in texts),
    *(
        ("identity-layout-is-nothing", unary("f64[2,1]", f"f64[2,1] = {line}", "f64[2,1] = exp(%1)"))
        for line in (
            "transpose(%0) {perm=(0,1)}",
            "reshape(%0) {shape=(2,1)}",
            "slice(%0) {start=(0,0), size=(2,1), step=(1,-1)}",
            "concat(%0) {axis=1}",
            "pad(%0) {before=(0,0), after=(0,0)}",
            "take(%0) {axis=0, indices=(0,1)}",
            "broadcast(%0) {shape=(2,1)}",
        )
    ),
)


REFUSES: dict[str, tuple[tuple[str, str], ...]] = {
    "identity-layout-is-nothing": (
        ("elements move", unary("f64[2,2]", "f64[2,2] = transpose(%0) {perm=(1,0)}")),
        ("elements move", unary("f64[2,2]", "f64[2,2] = slice(%0) {start=(1,0), size=(2,2), step=(-1,1)}")),
        ("elements move", unary("f64[2,2]", "f64[2,2] = take(%0) {axis=0, indices=(1,1)}")),
    ),
    "affine-steps-compose": (
        (
            "the chain continues",
            unary("f64[2,3]", "f64[2,3] = constant {uniform=2.0}", "f64[2,3] = mul(%0, %1)", "f64[2,3] = neg(%2)"),
        ),
        *(("no fewer steps", step_twice(*steps)) for steps in OUT_OF_RANGE),
        (
            "no fewer steps",
            unary("f64[2,3]", "f64[2,3] = constant {uniform=2.0}", "f64[2,3] = mul(%0, %1)", "f64[2,3] = add(%2, %1)"),
        ),
        ("no fewer steps", unary("f64[2,3]", "f64[2,3] = constant {uniform=0.0}", "f64[2,3] = add(%0, %1)")),
        (
            "no fewer steps",
            unary("f64[2,3]", "f64[2,3] = constant {uniform=0.0}", "f64[2,3] = add(%0, %1)", "f64[2,3] = neg(%2)"),
        ),
    ),
    "div-by-power-of-two-is-mul": (
        ("a division of integers", divide("uniform=2", "i32")),
        ("the divisor is not a power of 2", divide("uniform=3.0")),
        ("the divisor is not a power of 2", divide("elements=[2.0, 3.0, 2.0, 2.0, 2.0, 2.0]")),
    ),
    "pool-is-one-axis-after-another": (
        ("one axis after another compares no less", unary("f64[1,2,9,9]", f"f64[1,2,8,8] = {pool(2, 0)}")),
    ),
    "large-pool-is-pool-of-small-pool": (
        ("the windows have dilations, or the smaller one strides", two_pools(pool(3, 2, dilations=(2, 2)), pool(9, 4))),
        ("the smaller window does not fit into the larger one", two_pools(pool(3, 1), pool(4, 3, pads_end=(0, 0)))),
    ),
    "matmul-chain-in-its-cheaper-order": (
        ("products of integers wrap", product("9,2", "2,9", "9,2", "9,9", "9,2", kind="i32")),
        ("the batches of the factors differ", product("2,9,2", "2,2,9", "1,9,2", "2,9,9", "2,9,2")),
        ("the other order multiplies no less", product("2,9", "9,2", "2,9", "2,2", "2,9")),
        ("the product is empty", product("0,9,2", "0,2,9", "0,9,2", "0,9,9", "0,9,2")),
    ),
    "conv-of-slices-is-strided-conv": (
        ("the convolution has groups or dilations", focus(groups=2)),
        ("the channels are not strided parts of one image", focus(step="1,1,1,1")),
        ("parts of the image are not read", FOCUS_OF_THREE),
        ("a sum of weights is not finite", focus("constant {uniform='inf'}")),
    ),
    "sum-of-products-is-matmul": (
        ("a sum of integers wraps", outer("3,1,4", "2,4", "2", "3,2,1", kind="i32")),
        ("the sum is empty", outer("3,1,0", "2,0", "2", "3,2,1", "3,2,0")),
        ("a factor does not vary along the sum", outer("3,1,1", "2,4", "2", "3,2,1")),
        ("neither factor varies along an axis", outer("3,1,4", "1,4", "2", "3,2,1")),
        ("each factor is used only once", outer("3,2,4", "2,4", "2", "3,2,1")),
    ),
    "sum-is-matmul-with-ones": (
        ("a sum of integers wraps", rows(kind="i32")),
        ("the sum is not over the columns", rows(0)),
    ),
    "row-scale-moves-behind-matmul": (
        ("the scale is a constant, which folds into weights", scaled(constant="digest=1f")),
        ("sums that are not scaled yet may overflow", scaled(kind="f16")),
        ("the scale varies along the sum", scaled(scale="1,6")),
        ("the scale varies along the sum", scaled(is_turned=True)),
        ("the product is far larger than what is scaled", scaled(n=25)),
    ),
    "computed-siblings-are-one-matmul": (
        ("there are too many siblings", joined(9, 400)),
        ("the joined operands are too large to be copied", joined(m=5)),
    ),
    "sum-of-linear-is-linear-of-sum": (
        ("the linear map is not of channels", pooled("1,3,1,1", "3,2,2,2", "1,3,3,3")),
        ("the sum is over the channels", pooled("1,1,4,4", sum_="reduce_sum(%2) {axes=(1,)}")),
        ("the shift is not summed as often at the borders", pooled(pad=1, shift=SHIFT)),
        (
            "no fewer values are mapped",
            pooled(
                sum_="pool_sum(%2) " + POOLED.replace("kernel=(2,2), strides=(2,2)", "kernel=(1,1), strides=(1,1)"),
                out="1,3,4,4",
            ),
        ),
        ("the values before the sum are needed too", pooled(more=', %2 "z"')),
        ("the shift is not per channel", pooled(shift="neg(%2)")),
    ),
    "tanh-of-softplus-is-a-quotient": (("e^40 is too large for the element type", gate("f16")),),
    "steps-come-before-the-move": (
        ("an element is not a float", tokens(kind="i32")),
        (
            "no primitive before the move could fuse the steps",
            unary("f64[2,3]", "f64[3,2] = transpose(%0) {perm=(1,0)}", "f64[3,2] = mul(%1, %1)"),
        ),
    ),
    "steps-come-before-the-broadcast": (
        ("a result is neither a float nor a step of conditions", grown("f64", "less(%2, %3)", "bool")),
        ("hardly fewer elements are computed", grown("f64", "mul(%2, %3)", rows="2,1,4")),
    ),
    "siblings-are-one-linear": (
        ("the siblings have groups", siblings(2, groups=2)),
        ("there are too many siblings", siblings(9)),
    ),
    "conv3x3-is-winograd": (
        (
            "the weights of the window are not constant",
            'graph(%0 "x": f64[1,16,6,6], %1 "w": f64[16,16,3,3]) -> (%2 "y")\n'
            "%2: f64[1,16,4,4] = conv(%0, %1) {strides=(1,1), pads_begin=(0,0), pads_end=(0,0), "
            "dilations=(1,1), groups=1}\n",
        ),
        ("the window has groups, strides or dilations", conv("1,32,9,9", "32,16,3,3", "1,32,7,7", groups=2)),
        (
            "the sums become integers, so they have to be exact",
            conv("1,16,9,8", "16,16,3,3", "1,16,7,6").replace('(%2 "y")', '(%3 "y")')
            + "%3: i32[1,16,7,6] = cast(%2) {to='i32'}\n",
        ),
        ("there are too few channels for a transform", conv("1,16,10,10", "15,16,3,3", "1,15,8,8")),
        (
            "the transforms would lose the bits of a half type",
            conv("1,16,9,8", "16,16,3,3", "1,16,7,6").replace("f64", "f16"),
        ),
        ("the image is too small for such tiles", conv("1,16,3,3", "16,16,3,3", "1,16,1,1")),
        ("other tiles take far fewer products", conv("1,16,18,18", "16,16,3,3", "1,16,16,16")),
        (
            "a transformed sum could exceed 32 bits",
            of_bytes(conv("1,600,6,6", "16,600,3,3", "1,16,4,4")).replace("digest=1f", "uniform=127"),
        ),
        (
            "a transformed weight is not finite",
            conv("1,16,10,10", "16,16,3,3", "1,16,8,8").replace("digest=1f", "uniform='inf'"),
        ),
    ),
    "channel-map-moves-to-its-cheapest-place": (
        (
            "the weights of the map are not constant",
            'graph(%0 "x": f64[1,2,4,4], %1 "w": f64[3,2,1,1]) -> (%2 "y")\n'
            "%2: f64[1,3,4,4] = conv(%0, %1) {strides=(1,1), pads_begin=(0,0), pads_end=(0,0), "
            "dilations=(1,1), groups=1}\n",
        ),
        (
            "the map differs along the batch",
            unary("f64[2,3,4]", "f64[2,4,1] = constant {digest=1f}", "f64[2,3,1] = matmul(%0, %1)"),
        ),
        ("the map has groups, strides or pads", conv("1,2,4,4", "3,2,1,1", "1,3,2,4", strides=(2, 1))),
        (
            "the map is of integers or of nothing",
            unary("f64[0,4]", "f64[4,1] = constant {digest=1f}", "f64[0,1] = matmul(%0, %1)"),
        ),
        (
            "a weight of the map is not finite",
            unary("f64[3,4]", "f64[4,1] = constant {uniform='inf'}", "f64[3,1] = matmul(%0, %1)"),
        ),
        (
            "the map can be done nowhere else",
            unary("f64[3,4]", "f64[4,1] = constant {digest=1f}", "f64[3,1] = matmul(%0, %1)"),
        ),
        (
            "no place for the map is cheaper",
            unary("f64[3,1]", "f64[1,4] = constant {digest=1f}", "f64[3,1] = neg(%0)", "f64[3,4] = matmul(%2, %1)"),
        ),
    ),
    "div-by-constant-is-mul": (
        ("the divisor is a power of two, which is exact", divide("uniform=-4.0")),
        ("the tensor is too small to gain", divide("uniform=3.0")),
        ("a division of integers", divide("uniform=3", "i32")),
    ),
    "scale-folds-into-linear-before-it": (
        (
            "the weights are not constant",
            'graph(%0 "x": f64[2,3], %1 "w": f64[3,4]) -> (%4 "y")\n%2: f64[2,4] = matmul(%0, %1)\n'
            "%3: f64[2,4] = constant {uniform=3.0}\n%4: f64[2,4] = mul(%2, %3)\n",
        ),
        ("there is no scale", after("uniform=3.0", "add")),
        ("the chain continues", after("uniform=3.0", "mul", "f64[1,4,3,3] = neg(%4)")),
        ("the unscaled value is needed too", after("uniform=3.0", "mul", "f64[1,4,3,3] = sub(%4, %2)")),
        ("the unscaled value is needed too", after("uniform=3.0", "mul").replace('(%4 "y")', '(%4 "y", %2 "z")')),
        (
            "the scale is not per channel",
            unary(
                "f64[1,2,4,4]",
                WEIGHTS,
                AFTER,
                "f64[3] = constant {elements=[1.0, 2.0, 3.0]}",
                "f64[1,4,3,3] = broadcast(%3) {shape=(1,4,3,3)}",
                "f64[1,4,3,3] = mul(%2, %4)",
            ),
        ),
        ("weights overflow or underflow", after("uniform='inf'", "mul")),
        ("weights overflow or underflow", after("uniform=0.0", "div")),
        ("weights overflow or underflow", of_tiny_weights(after("uniform=1e-25", "mul"))),
    ),
    "affine-folds-into-linear-after-it": (
        ("the shift comes before zero pads", before("uniform=3.0", "add", 1)),
        (
            "the scale is not per channel",
            unary(
                "f64[3,4]",
                "f64[3,1] = constant {elements=[1.0, 2.0, 3.0]}",
                "f64[3,4] = broadcast(%1) {shape=(3,4)}",
                "f64[3,4] = mul(%0, %2)",
                "f64[4,2] = constant {digest=1f}",
                "f64[3,2] = matmul(%3, %4)",
            ),
        ),
        (
            "the shift comes before batched weights",
            unary(
                "f64[1,3,4]",
                "f64[1,3,4] = constant {uniform=3.0}",
                "f64[1,3,4] = add(%0, %1)",
                "f64[2,4,2] = constant {digest=1f}",
                "f64[2,3,2] = matmul(%2, %3)",
            ),
        ),
        ("weights overflow or underflow", before("uniform='nan'", "mul", 0)),
        ("weights overflow or underflow", of_tiny_weights(before("uniform=1e-25", "mul", 0))),
        ("a shift is not finite", before("uniform='inf'", "add", 0)),
        (
            "a shift is not finite",
            unary(
                "f64[3,4]",
                "f64[3,4] = constant {uniform=1e308}",
                "f64[3,4] = add(%0, %1)",
                "f64[4,2] = constant {uniform=2.0}",
                "f64[3,2] = matmul(%2, %3)",
            ),
        ),
    ),
    "conv1x1-is-matmul": (
        ("the convolution has groups", conv("1,4,4,5", "2,2,1,1", "1,2,4,5", groups=2)),
        ("the convolution has strides", conv("1,3,4,5", "2,3,1,1", "1,2,2,5", strides=(2, 1))),
        ("the convolution is padded", conv("1,3,4,5", "2,3,1,1", "1,2,5,5", pads_end=(1, 0))),
        ("the batch is not 1", conv("2,3,4,5", "2,3,1,1", "2,2,4,5")),
        (
            "convolutions of bytes read rows of channels, as products do",
            conv("1,3,4,5", "2,3,1,1", "1,2,4,5")
            .replace("y: f64", "y: i32")
            .replace("f64[1,2", "i32[1,2")
            .replace("f64", "u8"),
        ),
    ),
    "conv-of-patches-is-matmul": (
        ("the convolution has groups or dilations", conv("1,4,4,4", "2,2,2,2", "1,2,2,2", strides=(2, 2), groups=2)),
        ("the convolution is padded", conv("1,3,4,4", "2,3,2,2", "1,2,3,2", strides=(2, 2), pads_end=(2, 0))),
        ("the windows leave a part of the image out", conv("1,3,5,4", "2,3,2,2", "1,2,2,2", strides=(2, 2))),
        (
            "convolutions of bytes read rows of channels, as products do",
            conv("1,3,4,4", "2,3,2,2", "1,2,2,2", strides=(2, 2))
            .replace("y: f64", "y: i32")
            .replace("f64[1,2", "i32[1,2")
            .replace("f64", "u8"),
        ),
    ),
    "zero-pad-folds-into-conv": (
        (
            "the pad is not of zeros",
            conv("1,1,4,4", "1,1,3,3", "1,1,4,2", pad("1,1,6,4", (0, 0, 1, 0), (0, 0, 1, 0), ", value=1.0")),
        ),
        (
            "the pad is not of zeros",
            conv("1,1,4,4", "1,1,3,3", "1,1,4,2", pad("1,1,6,4", (0, 0, 1, 0), (0, 0, 1, 0), ", mode='edge'")),
        ),
        (
            "the pad adds images or channels",
            conv("1,1,4,4", "1,2,3,3", "1,1,2,2", pad("1,2,4,4", (0, 0, 0, 0), (0, 1, 0, 0))),
        ),
    ),
    "few-channel-conv-is-row-conv": (
        (
            "the weights are not constant",
            'graph(%0 "x": f64[1,1,4,4], %1 "w": f64[1,1,3,3]) -> (%2 "y")\n'
            "%2: f64[1,1,2,2] = conv(%0, %1) {strides=(1,1), pads_begin=(0,0), pads_end=(0,0), "
            "dilations=(1,1), groups=1}\n",
        ),
        ("the convolution has groups", conv("1,2,4,4", "2,1,3,3", "1,2,2,2", groups=2)),
        ("the rows have a stride or a dilation", conv("1,1,5,4", "1,1,3,3", "1,1,2,2", strides=(2, 1))),
        ("the rows have a stride or a dilation", conv("1,1,5,4", "1,1,3,3", "1,1,1,2", dilations=(2, 1))),
        ("the batch is not 1", conv("2,1,4,4", "1,1,3,3", "2,1,2,2")),
    ),
}

REFUSING: tuple[tuple[str, str, str], ...] = (
    *((rule, reason, text) for rule, cases in (REFUSES | quantized_examples.REFUSES).items() for reason, text in cases),
    *(
        (name, "the divisor or its reciprocal is not a normal number", divide(c, dtype))
        for name in ("div-by-power-of-two-is-mul", "div-by-constant-is-mul")
        for c, dtype in (
            ("uniform=0.0", "f64"),
            ("uniform='inf'", "f64"),
            ("uniform='nan'", "f64"),
            ("uniform=1.7014118346046923e+38", "f32"),
            ("uniform=32768.0", "f16"),
            ("uniform=5e-324", "f64"),
        )
    ),
)
