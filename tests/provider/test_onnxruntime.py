"""Opaque operators run by ONNX Runtime: every type, several outputs, and the reasons of refusals."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from korch.candidate.candidate import Group, Offer, Refusal, make_group
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import ValueType
from korch.provider.onnxruntime import OnnxRuntimeProvider
from korch.provider.provider import Kernel
from korch.system.extras import install_command
from korch.testing.kernels import KernelError, check_offers, load_kernels, run_kernel
from korch.testing.samples import random_arrays


@pytest.fixture(scope="module")
def provider():
    pytest.importorskip("onnxruntime", reason="the provider needs the package onnxruntime")
    return OnnxRuntimeProvider()


def opaque_group(
    op_type: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    wanted: Sequence[int] = (0,),
    constants: dict[int, np.ndarray] | None = None,
    domain: str = "",
    opset: int = 17,
    **attributes,
) -> Group:
    """Return the group of some outputs of a node; constants by input position."""
    node = onnx.helper.make_node(
        op_type,
        [f"x{i}" for i in range(len(inputs))],
        [f"y{i}" if text else "" for i, text in enumerate(outputs)],
        domain=domain,
        **attributes,
    )
    builder = GraphBuilder()
    values = [
        builder.constant(constants[i])
        if constants and i in constants
        else builder.input(f"x{i}", ValueType.parse(text))
        for i, text in enumerate(inputs)
    ]
    for i in wanted:
        row = OpaqueAttributes(op_type, domain, opset, node.SerializeToString().hex(), tuple(inputs), tuple(outputs), i)
        builder.output(f"y{i}", builder.add("opaque", values, row))
    graph = builder.freeze()
    return make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])


def build(provider, group, target) -> tuple[Offer, Kernel]:
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal), offers
    kernel = provider.build(group, offers[0], target)
    assert isinstance(kernel, Kernel), kernel
    return offers[0], kernel


def test_operators_with_all_kinds_of_types_match_onnx(provider, target, builder, rng):
    groups = [
        opaque_group("Elu", ["f32[2,3,4]"], ["f32[2,3,4]"], alpha=0.7),
        opaque_group("Elu", ["f32[]"], ["f32[]"]),
        opaque_group("Elu", ["f32[0,3]"], ["f32[0,3]"]),
        opaque_group("Identity", ["bool[5]"], ["bool[5]"]),
        opaque_group("Not", ["bool[5]"], ["bool[5]"]),
        *(
            opaque_group("Identity", [f"{d}[3,2]"], [f"{d}[3,2]"])
            for d in ("f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")
        ),
        opaque_group("CumSum", ["f32[3,4]", "i64[]"], ["f32[3,4]"], constants={1: np.array(1, np.int64)}),
        opaque_group(
            "Range",
            ["i64[]", "i64[]", "i64[]"],
            ["i64[4]"],
            constants={0: np.array(1, np.int64), 1: np.array(9, np.int64), 2: np.array(2, np.int64)},
        ),
        opaque_group("Det", ["f32[2,3,3]"], ["f32[2]"]),
        opaque_group("Mod", ["i32[6]", "i32[6]"], ["i32[6]"], constants={1: np.array([1, 2, 3, -2, 5, 6], np.int32)}),
    ]
    checked = check_offers(provider, groups, target, builder, rng)
    assert len(checked) == len(groups)


def test_several_outputs_of_one_node_are_one_session(provider, target, builder, rng):
    both = opaque_group("TopK", ["f32[3,8]", "i64[1]"], ["f32[3,2]", "i64[3,2]"], (0, 1), constants={1: np.array([2])})
    swapped = opaque_group(
        "TopK", ["f32[3,8]", "i64[1]"], ["f32[3,2]", "i64[3,2]"], (1, 0), constants={1: np.array([2])}
    )
    second = opaque_group("TopK", ["f32[3,8]", "i64[1]"], ["f32[3,2]", "i64[3,2]"], (1,), constants={1: np.array([2])})
    skipped = opaque_group(
        "LSTM", ["f32[3,2,4]", "f32[1,20,4]", "f32[1,20,5]"], ["", "f32[1,2,5]", "f32[1,2,5]"], (1, 2), hidden_size=5
    )
    assert len(both.outputs) == 2
    assert both.key != swapped.key
    check_offers(provider, [both, swapped, second, skipped], target, builder, rng)


@pytest.mark.parametrize(("dtype", "axis", "is_offered"), [("f32", -1, False), ("f32", 0, True), ("i32", -1, True)])
def test_smallest_floats_are_left_to_the_kernel_that_orders_nan(provider, target, dtype, axis, is_offered):
    group = opaque_group(
        "TopK",
        [f"{dtype}[4,4]", "i64[1]"],
        [f"{dtype}[4,4]", "i64[4,4]"],
        constants={1: np.array([4])},
        axis=axis,
        largest=0,
    )
    assert isinstance(provider.offer(group, target), Refusal) != is_offered


def test_a_large_uniform_constant_is_not_written_out(provider, target, builder, rng):
    group = opaque_group(
        "Mod",
        ["f32[100,100]", "f32[100,100]"],
        ["f32[100,100]"],
        constants={1: np.full((100, 100), 0.75, np.float32)},
        fmod=1,
    )
    ((_, _, kernel),) = check_offers(provider, [group], target, builder, rng)
    assert len(kernel.source) < 5000


def test_buffers_may_move_between_runs(provider, target, builder, rng):
    group = opaque_group("Elu", ["f32[64]"], ["f32[64]"])
    offer, kernel = build(provider, group, target)
    library = load_kernels([kernel], builder)
    for _ in range(3):
        (x,) = random_arrays(rng, group.input_types)
        (y,) = run_kernel(kernel, group, offer, [x], builder, library=library)
        np.testing.assert_allclose(y, np.where(x > 0, x, np.exp(x) - 1), rtol=1e-5, atol=1e-6)


def test_one_state_follows_its_buffers(provider, target, builder, rng):
    group = opaque_group("Elu", ["f32[64]"], ["f32[64]"])
    _, kernel = build(provider, group, target)
    library = load_kernels([kernel], builder)
    create = library.function(kernel.symbol + "_create", ctypes.c_void_p)
    error = ctypes.create_string_buffer(256)
    state = ctypes.c_void_p(create(1, error, ctypes.c_size_t(256)))
    for _ in range(3):
        x = np.abs(random_arrays(rng, group.input_types)[0])
        y = np.empty_like(x)
        buffers = (ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data)
        assert library.function(kernel.symbol + "_run")(state, buffers) == 0
        np.testing.assert_array_equal(x, y)
    library.function(kernel.symbol + "_destroy")(state)


def test_a_run_that_fails_returns_an_error(provider, target, builder):
    # The declared shape is not the one that these limits give.
    group = opaque_group("Range", ["i64[]", "i64[]", "i64[]"], ["i64[4]"])
    offer, kernel = build(provider, group, target)
    numbers = [np.array(n, np.int64) for n in (0, 7, 1)]
    with pytest.raises(KernelError, match="_run returned 1"):
        run_kernel(kernel, group, offer, numbers, builder)


def test_a_library_that_cannot_be_opened_is_a_message(provider, target, builder, tmp_path):
    group = opaque_group("Elu", ["f32[4]"], ["f32[4]"])
    _, kernel = build(provider, group, target)
    path = tmp_path / "kernels.a"
    path.write_bytes(builder.objects(kernel.texts))
    code = (
        "import ctypes, sys, pathlib; from korch.system.native import Code, runtime;"
        "runtime().korch_use_onnxruntime(b'/nowhere.so');"
        "create = Code(pathlib.Path(sys.argv[1]).read_bytes()).function(sys.argv[2] + '_create', ctypes.c_void_p);"
        "error = ctypes.create_string_buffer(512);"
        "print(create(1, error, ctypes.c_size_t(512)), error.value.decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), kernel.symbol], text=True, capture_output=True, check=True
    )
    assert done.stdout.startswith("None libonnxruntime.so.1 can't be opened: ")


def test_refuses_what_is_not_opaque(provider, target):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4]"))
    builder.output("y", builder.add("abs", [x]))
    group = make_group(builder.freeze(), [0], [1])
    assert provider.offer(group, target) == Refusal("only opaque operators are run by ONNX Runtime")
    assert isinstance(provider.build(group, Offer((), ()), target), Refusal)


def test_refuses_two_operators(provider, target):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4]"))
    for alpha in (1.0, 2.0):
        node = onnx.helper.make_node("Elu", ["x0"], ["y0"], alpha=alpha)
        row = OpaqueAttributes("Elu", "", 17, node.SerializeToString().hex(), ("f32[4]",), ("f32[4]",), 0)
        builder.output(f"y{alpha}", builder.add("opaque", [x], row))
    graph = builder.freeze()
    group = make_group(graph, [0, 1], [v for _, v in graph.outputs])
    assert provider.offer(group, target) == Refusal("these are several operators")


def test_refuses_a_node_that_onnxruntime_does_not_know(provider, target):
    group = opaque_group("Nonsense", ["f32[4]"], ["f32[4]"], domain="nobody.knows", opset=1)
    refusal = provider.offer(group, target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("ONNX Runtime: ")
    assert "Nonsense" in refusal.reason


def test_refuses_a_node_with_a_large_tensor_inside(provider, target):
    value = onnx.numpy_helper.from_array(np.arange(100_000, dtype=np.float32))
    branch = onnx.parser.parse_graph("g () => (float[100000] z) { z = Constant() }")
    branch.node[0].attribute.append(onnx.helper.make_attribute("value", value))
    group = opaque_group("If", ["bool[]"], ["f32[100000]"], then_branch=branch, else_branch=branch)
    refusal = provider.offer(group, target)
    assert isinstance(refusal, Refusal)
    assert "at most 262144 go in" in refusal.reason


def test_is_left_out_without_the_package(monkeypatch):
    monkeypatch.setattr("korch.provider.onnxruntime.find_onnxruntime", lambda: None)
    with pytest.raises(ImportError, match=re.escape(install_command("onnxruntime"))):
        OnnxRuntimeProvider()


def test_version_names_the_library(provider):
    import onnxruntime

    assert provider.version.startswith(onnxruntime.__version__)


def test_equal_groups_have_equal_sources(provider, target):
    group = opaque_group("Elu", ["f32[4]"], ["f32[4]"])
    again = opaque_group("Elu", ["f32[4]"], ["f32[4]"])
    assert build(provider, group, target) == build(provider, again, target)
