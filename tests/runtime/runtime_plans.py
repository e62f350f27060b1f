"""Small plans with hand-written kernels, each with its equivalent in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from korch.candidate.candidate import Candidate, Offer, make_group, make_layout_change
from korch.candidate.layout import Layout
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.provider import Kernel, Threading
from korch.runtime.bind import PlanStep
from korch.target import Target
from tests.support.c_code import MEMBER, llvm_of

TARGET = Target(isa="generic", lanes=4, threads=2)


@dataclass(frozen=True)
class Plan:
    graph: PrimitiveGraph
    steps: tuple[PlanStep, ...]
    meaning: Callable[..., tuple[np.ndarray, ...]]


def loop(symbol, size, body, inputs=1, outputs=1, **fields):
    """A kernel that runs `body` for i < size; it has i0, i1, ..., o0, o1, ... and w."""
    lines = [f"const float *i{j} = (const float *)buffers[{j}];" for j in range(inputs)]
    lines += [f"float *o{j} = (float *)buffers[{inputs + j}];" for j in range(outputs)]
    if fields.get("workspace_bytes"):
        lines.append(f"float *w = (float *)buffers[{inputs + outputs}];")
    lines.append(f"for (long i = 0; i < {size}; ++i) {{ {body} }}")
    return Kernel(symbol, run_source(symbol, *lines), threading=Threading.CALLER, **fields)


def run_source(symbol, *lines):
    body = "".join(f"    {line}\n" for line in lines)
    return llvm_of(run_text(symbol, body))


def run_text(symbol, body):
    """The C source of a kernel without a state, or of the part of one that runs."""
    head = f"int {symbol}_run(void *state, void *const *buffers)"
    return f"#include <stddef.h>\n#include <string.h>\n{MEMBER}{head} {{\n{body}    return 0;\n}}\n"


def step(graph, values, kernel, outputs=None, into=(), out_of=()):
    """A step that computes `values`, in the layouts `into` -> `out_of` (plain if not given)."""
    primitives = [graph.producers[value][0] for value in values]
    group = make_group(graph, primitives, outputs or values)
    return _step(group, kernel, into, out_of)


def in_place(graph, value):
    found = step(graph, [value], Kernel("", ""))
    offer = replace(found.candidate.offer, is_in_place=True)
    return PlanStep(replace(found.candidate, offer=offer), found.kernel, is_measured=True)


def layout_step(graph, value, kernel, into, out_of):
    return _step(make_layout_change(graph, value), kernel, (into,), (out_of,))


def _step(group, kernel, into, out_of):
    inputs = tuple(into) or tuple(Layout.plain(t.rank) for t in group.input_types)
    outputs = tuple(out_of) or tuple(Layout.plain(t.rank) for t in group.output_types)
    candidate = Candidate(group, "hand", Offer(inputs, outputs))
    return PlanStep(candidate, kernel, cost_ns=100.0, bound_ns=10.0, is_measured=True)


def value_of(graph, op, position=0):
    return [p.output for p in graph.primitives if p.op == op][position]


def new_graph(**inputs):
    builder = GraphBuilder()
    ids = [builder.input(name, ValueType.parse(text)) for name, text in inputs.items()]
    return builder, *ids


def chain():
    """y = |-exp(x)|: both intermediates in the arena."""
    builder, x = new_graph(x="f32[3,5]")
    builder.output("y", builder.add("abs", [builder.add("neg", [builder.add("exp", [x])])]))
    graph = builder.freeze()
    steps = (
        step(graph, [value_of(graph, "exp")], loop("k_exp", 15, "o0[i] = __builtin_expf(i0[i]);")),
        step(graph, [value_of(graph, "neg")], loop("k_neg", 15, "o0[i] = -i0[i];")),
        step(graph, [value_of(graph, "abs")], loop("k_abs", 15, "o0[i] = i0[i] < 0 ? -i0[i] : i0[i];")),
    )
    return Plan(graph, steps, lambda x: (np.exp(x),))


def several_outputs():
    """One kernel writes two values, of which another reads one."""
    builder, x, y = new_graph(x="f32[8]", y="f32[8]")
    total = builder.add("add", [x, y])
    builder.output("difference", builder.add("sub", [x, y]))
    builder.output("negative", builder.add("neg", [total]))
    graph = builder.freeze()
    both = [value_of(graph, "add"), value_of(graph, "sub")]
    body = "o0[i] = i0[i] + i1[i]; o1[i] = i0[i] - i1[i];"
    steps = (
        step(graph, both, loop("k_both", 8, body, inputs=2, outputs=2)),
        step(graph, [value_of(graph, "neg")], loop("k_neg8", 8, "o0[i] = -i0[i];")),
    )
    return Plan(graph, steps, lambda x, y: (x - y, -(x + y)))


def layouts():
    """A value is turned to channels-last, worked on there, and turned back."""
    builder, x = new_graph(x="f32[1,3,2,2]")
    builder.output("y", builder.add("neg", [x]))
    graph = builder.freeze()
    last, plain = Layout((0, 2, 3, 1)), Layout.plain(4)
    y = graph.outputs[0][1]
    there = loop("k_there", 12, "o0[i % 4 * 3 + i / 4] = i0[i];")
    back = loop("k_back", 12, "o0[i] = i0[i % 4 * 3 + i / 4];")
    # Only the first element of each pixel is negated twice, so a wrong order shows.
    work = loop("k_work", 12, "o0[i] = i % 3 ? -i0[i] : i0[i];")
    steps = (
        layout_step(graph, graph.inputs[0][1], there, plain, last),
        step(graph, [y], work, into=(last,), out_of=(last,)),
        layout_step(graph, y, back, last, plain),
    )

    def meaning(x):
        signs = np.array([1, -1, -1], np.float32).reshape(1, 3, 1, 1)
        return (x * signs,)

    return Plan(graph, steps, meaning)


def blocked_constant():
    """A constant is read in blocks of four channels, of which the last is padded, and plain."""
    weights = np.arange(20, dtype=np.float32).reshape(1, 5, 2, 2)
    builder, x = new_graph(x="f32[1,5,2,2]")
    inner = builder.add("mul", [x, builder.constant(weights)])
    builder.output("y", builder.add("add", [inner, builder.constant(weights)]))
    graph = builder.freeze()
    plain, blocked = Layout.plain(4), Layout((0, 1, 2, 3), ((1, 4),))
    blocked_at = "i1[((i / 4) / 4 * 4 + i % 4) * 4 + (i / 4) % 4]"
    mul = loop("k_mul", 20, f"o0[i] = i0[i] * {blocked_at};", inputs=2)
    add = loop("k_add", 20, "o0[i] = i0[i] + i1[i];", inputs=2)
    steps = (
        step(graph, [value_of(graph, "mul")], mul, into=(plain, blocked)),
        step(graph, [value_of(graph, "add")], add),
    )
    return Plan(graph, steps, lambda x: (x * weights + weights,))


def workspace():
    """A kernel needs scratch memory; what is live beside it must stay whole."""
    builder, x = new_graph(x="f32[64]")
    a = builder.add("exp", [x])
    builder.output("y", builder.add("add", [a, builder.add("neg", [a])]))
    graph = builder.freeze()
    scratch = loop(
        "k_scratch",
        64,
        "w[i] = -i0[i]; o0[63 - i] = 0; if (i == 63) for (long j = 0; j < 64; ++j) o0[j] = 3 * w[j];",
        workspace_bytes=256,
    )
    steps = (
        step(graph, [value_of(graph, "exp")], loop("k_twice", 64, "o0[i] = 2 * i0[i];")),
        step(graph, [value_of(graph, "neg")], scratch),
        step(graph, [value_of(graph, "add")], loop("k_sum", 64, "o0[i] = i0[i] + i1[i];", inputs=2)),
    )
    return Plan(graph, steps, lambda x: (-4 * x,))


def state(destroyed=0):
    """A kernel adds the number of its threads, which its state holds; it is used twice.

    Destroyed states are counted at an address, unless it is 0.
    """
    builder, x = new_graph(x="f32[4]")
    builder.output("y", builder.add("neg", [builder.add("abs", [x])]))
    graph = builder.freeze()
    body = "for (int i = 0; i < 4; ++i) ((float *)buffers[1])[i] = ((float *)buffers[0])[i] + *(int *)state;"
    source = f"""{run_text("k_state", body)}
static int states[16], used;
void *k_state_create(int threads, char *error, size_t error_size) {{
    states[used] = threads;
    return &states[used++];
}}
void k_state_destroy(void *state) {{
    if ({destroyed}ul) ++*(long *){destroyed}ul;
}}
"""
    kernel = Kernel("k_state", llvm_of(source), has_state=True, threading=Threading.CALLER)
    steps = tuple(step(graph, [value_of(graph, op)], kernel) for op in ("abs", "neg"))
    return Plan(graph, steps, lambda x: (x + 2 * TARGET.threads,))


def failing_create(message):
    plan = state()
    source = f"""{run_text("k_bad", "")}
static const char message[] = "{message}";
void *k_bad_create(int threads, char *error, size_t size) {{
    for (size_t i = 0; i < sizeof message && i < size; ++i) error[i] = message[i];
    return 0;
}}
void k_bad_destroy(void *state) {{}}
"""
    bad = replace(plan.steps[1], kernel=Kernel("k_bad", llvm_of(source), has_state=True))
    return replace(plan, steps=(plan.steps[0], bad))


def failing_run():
    plan = chain()
    bad = replace(
        plan.steps[1],
        kernel=Kernel("k_fails", run_source("k_fails", "if (*(const float *)buffers[0] > 100) return 1;")),
    )
    return replace(plan, steps=(plan.steps[0], bad, plan.steps[2]))


def empty():
    """Values without elements go through as any others."""
    builder, x = new_graph(x="f32[0,3]")
    builder.output("y", builder.add("neg", [builder.add("abs", [x])]))
    graph = builder.freeze()
    kernel = loop("k_empty", 0, "o0[i] = i0[i];")
    steps = tuple(step(graph, [value_of(graph, op)], kernel) for op in ("abs", "neg"))
    return Plan(graph, steps, lambda x: (x,))


def scalar():
    """Values of rank 0."""
    builder, x = new_graph(x="f32[]")
    builder.output("y", builder.add("neg", [x]))
    graph = builder.freeze()
    return Plan(graph, (step(graph, [graph.outputs[0][1]], loop("k_one", 1, "*o0 = -*i0;")),), lambda x: (-x,))


def passed_through():
    """Outputs that are an input, a constant, a uniform constant, and another output."""
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    builder, x = new_graph(x="f32[2,3]")
    y = builder.add("neg", [x])
    for name, value in (
        ("input", x),
        ("table", builder.constant(table)),
        ("ones", builder.constant(np.ones((2, 3), np.float16))),
        ("y", y),
        ("again", y),
    ):
        builder.output(name, value)
    graph = builder.freeze()
    kernel = loop("k_neg6", 6, "o0[i] = -i0[i];")
    steps = (step(graph, [value_of(graph, "neg")], kernel),)
    return Plan(graph, steps, lambda x: (x, table, np.ones((2, 3), np.float16), -x, -x))


def recomputed():
    """A value is produced twice; each reader has the newest."""
    builder, x = new_graph(x="f32[4]")
    a = builder.add("abs", [x])
    builder.output("y", builder.add("neg", [a]))
    builder.output("z", builder.add("exp", [a]))
    graph = builder.freeze()
    a = value_of(graph, "abs")
    steps = (
        step(graph, [a], loop("k_plus", 4, "o0[i] = i0[i] + 1;")),
        step(graph, [value_of(graph, "neg")], loop("k_neg4", 4, "o0[i] = -i0[i];")),
        step(graph, [a], loop("k_minus", 4, "o0[i] = i0[i] - 1;")),
        step(graph, [value_of(graph, "exp")], loop("k_double", 4, "o0[i] = 2 * i0[i];")),
    )
    return Plan(graph, steps, lambda x: (-(x + 1), 2 * (x - 1)))


def concatenated():
    """Parts of parts of an output: another one is copied from it, and one is read later."""
    builder, x = new_graph(x="f32[1,16]")
    a, b = builder.add("exp", [x]), builder.add("neg", [x])
    inner = builder.add("concat", [a, b], ConcatAttributes(1))
    whole = builder.add("concat", [builder.add("abs", [inner]), inner], ConcatAttributes(1))
    builder.output("part", b)
    builder.output("whole", whole)
    builder.output("late", builder.add("tanh", [a]))
    graph = builder.freeze()
    steps = (
        step(graph, [value_of(graph, "exp")], loop("k_exp16", 16, "o0[i] = i0[i] * 3;")),
        step(graph, [value_of(graph, "neg")], loop("k_neg16", 16, "o0[i] = -i0[i];")),
        in_place(graph, value_of(graph, "concat")),
        step(graph, [value_of(graph, "abs")], loop("k_more", 32, "o0[i] = i0[i] + 100;", workspace_bytes=64)),
        in_place(graph, value_of(graph, "concat", 1)),
        step(graph, [value_of(graph, "tanh")], loop("k_late", 16, "o0[i] = i0[i] + 7;")),
    )

    def meaning(x):
        inner = np.concatenate([3 * x, -x], 1)
        return -x, np.concatenate([inner + 100, inner], 1), 3 * x + 7

    return Plan(graph, steps, meaning)


def types():
    """A value of each element type is passed through a kernel that copies bytes."""
    builder = GraphBuilder()
    for name in (dtype.value for dtype in DType):
        x = builder.input(name, ValueType.parse(f"{name}[3]"))
        op = "not" if name == "bool" else "neg"
        builder.output(f"{name}_out", builder.add(op, [x]) if name[0] != "u" else x)
    graph = builder.freeze()
    steps = []
    for _, value in graph.outputs:
        if graph.producers[value]:
            size = graph.types[value].size_bytes
            symbol = f"k_bytes{size}"
            body = run_source(symbol, f"__builtin_memcpy(buffers[1], buffers[0], {size});")
            steps.append(step(graph, [value], Kernel(symbol, body, threading=Threading.CALLER)))
    return Plan(graph, tuple(steps), lambda *arrays: arrays)


PLANS = (
    chain,
    several_outputs,
    layouts,
    blocked_constant,
    workspace,
    state,
    empty,
    scalar,
    passed_through,
    recomputed,
    concatenated,
    types,
)


def random_arrays(graph, seed=0):
    rng = np.random.default_rng(seed)
    arrays = []
    for _, value in graph.inputs:
        type_ = graph.types[value]
        arrays.append(np.asarray(rng.uniform(0, 4, type_.shape)).astype(type_.dtype.numpy))
    return arrays


def tables_of(sources):
    """Return the tables of the only plan among an artifact's sources."""
    (text,) = (text for name, text in sources.items() if name.startswith("plan_"))
    return text
