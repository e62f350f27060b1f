import ctypes
import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch.candidate.layout import Layout
from korch.cli import main
from korch.errors import ArtifactError, InputError, ProviderError
from korch.provider.provider import Kernel
from korch.runtime.executable import Executable
from korch.runtime.record import ModelRecord
from korch.system.archive import pack_objects
from korch.system.native import runtime
from tests.runtime import runtime_plans as plans
from tests.runtime.test_fork import SIZE, parallel_plan


def assert_same(found, expected):
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        assert f.shape == e.shape
        np.testing.assert_allclose(f.astype(np.float64), e.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("make", plans.PLANS)
def test_a_plan_computes_what_it_means_built_and_loaded(make, make_executable, tmp_path):
    plan = make()
    executable = make_executable(plan)
    arrays = plans.random_arrays(plan.graph)
    copies = [array.copy() for array in arrays]
    expected = plan.meaning(*arrays)
    assert_same(executable(*arrays), expected)
    executable.save(tmp_path / "plan.korch")
    loaded = Executable.load(tmp_path / "plan.korch")
    assert_same(loaded(*arrays), expected)
    assert_same(loaded(*arrays), expected)  # a second run finds used memory
    assert_same(arrays, copies)
    assert loaded.plan == executable.plan
    assert loaded.sources == executable.sources


def test_run_is_a_drop_in_for_a_session_of_onnx_runtime(make_executable):
    executable = make_executable(plans.several_outputs())
    x, y = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    assert_same(executable.run(None, {"y": y, "x": x}), [x - y, -(x + y)])
    assert_same(executable.run(["negative"], {"x": x, "y": y}), [-(x + y)])
    assert_same(executable.run(["negative", "difference"], {"x": x, "y": y}, None), [-(x + y), x - y])
    (first, second) = executable.get_inputs()
    assert (first.name, first.shape, first.type) == ("x", [8], "tensor(float)")
    assert first.dtype == np.float32
    assert second.name == "y"
    assert [tensor.name for tensor in executable.get_outputs()] == ["difference", "negative"]


def test_inputs_with_a_default_may_be_left_out(make_executable, tmp_path, capsys):
    x, y, default = np.arange(8, dtype=np.float32), np.ones(8, np.float32), np.full(8, 3, np.float32)
    executable = make_executable(plans.several_outputs(), model=ModelRecord().with_defaults({"y": default}))
    executable.save(tmp_path / "plan.korch")
    np.save(tmp_path / "x.npy", x)
    loaded = Executable.load(tmp_path / "plan.korch")
    assert [info.name for info in loaded.get_overridable_initializers()] == ["y"]
    assert "'y': tensor(float) [8], has a default" in repr(loaded)
    usual, given = [x - default, -(x + default)], [x - y, -(x + y)]
    for found in (loaded(x), loaded(x=x), loaded.run(None, {"x": x}), loaded.bind(x)()):
        assert_same(found, usual)
    for found in (loaded(x, y), loaded(y=y, x=x), loaded.run(None, {"x": x, "y": y}), loaded.bind(x, y)()):
        assert_same(found, given)
    assert main(["run", str(tmp_path / "plan.korch"), f"--input=x={tmp_path / 'x.npy'}", "--repeat", "1"]) == 0
    with pytest.raises(InputError, match=r"called with 0 arrays; expected 2: 'x', 'y', or 1 without 'y'"):
        loaded()
    with pytest.raises(InputError, match="input 'x' is missing: only 'y' is given"):
        loaded(y=y)


def test_indices_out_of_range_are_named_at_each_run(cache_folder):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (int64[n] at, int64[1] row, float[10] x) => (float[n, 2] y, float[1] z)
    <float[3, 2] table = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> {
        narrow = Cast <to = 6> (at)
        y = Gather(table, narrow)
        z = Gather(x, row)
    }"""
    for sizes, limits in ((10, {"at": (-3, 2), "row": (-10, 9)}), (range(1, 20), {"at": (-3, 2)})):
        quick = korch.SearchLimits(max_primitives=4, max_candidates=200)
        found = korch.optimize(
            onnx.parser.parse_model(text), shapes={"n": sizes}, cache_folder=cache_folder, measure=False, search=quick
        )
        assert found.model.limits == limits
        at, row, x = np.array([2, -3] * 5), np.array([1]), np.ones(10, np.float32)
        assert found(at, row, x)[0][:2, 0].tolist() == [5, 1]
        for wrong in (3, -4):
            with pytest.raises(InputError, match=rf"input 'at': it has the index {wrong}; expected -3 to 2"):
                found(np.array([0] * 9 + [wrong]), row, x)
        if sizes == 10:
            with pytest.raises(InputError, match="input 'row': it has the index 10; expected -10 to 9"):
                found(at, np.array([10]), x)
            run = found.bind(at, row, x)
            at[3] = 7
            with pytest.raises(InputError, match="input 'at': it has the index 7"):
                run()


def test_bound_arrays_are_read_and_written_at_each_run(make_executable):
    executable = make_executable(plans.several_outputs())
    x, y = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    run = executable.bind(x, y)
    first = run()
    assert_same(first, [x - y, -(x + y)])
    x[:] = 7
    second = run()
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert_same(second, [x - y, -(x + y)])


@pytest.mark.parametrize("x", [np.zeros(16, np.float32)[::2], np.zeros(8, ">f4"), np.zeros(9, np.float32)])
def test_arrays_that_cant_be_bound_are_refused(x, make_executable):
    executable = make_executable(plans.several_outputs())
    with pytest.raises(InputError, match="input 'x'"):
        executable.bind(x, np.ones(8, np.float32))
    with pytest.raises(InputError, match="with 1 arrays"):
        executable.bind(np.ones(8, np.float32))


def test_types_are_named_as_onnx_runtime_names_them(make_executable):
    executable = make_executable(plans.types())
    names = ["double", "float", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
    names += ["uint64", "uint32", "uint16", "uint8", "bool"]
    assert [t.type for t in executable.get_inputs()] == [f"tensor({name})" for name in names]


X = np.zeros(8, np.float32)
ONE = "expected an array for each of 'x', 'y'"


@pytest.mark.parametrize(
    ("names", "feeds", "text"),
    [
        (None, {"x": X}, f"input 'y' is missing: only 'x' is given; {ONE}"),
        (None, [X, X], "the feeds are of type list; expected a dict with an array for each of 'x', 'y'"),
        (None, None, "the feeds are of type NoneType; expected a dict with an array for each of 'x', 'y'"),
        (None, {"x": X, "y": X, "z": X}, f"there is no input 'z'; {ONE}"),
        (["sum"], {"x": X, "y": X}, "there is no output 'sum'; expected 'difference', 'negative'"),
        (None, {"x": X, "y": X[:7]}, "input 'y': it is f32[7]; expected f32[8]"),
        (None, {"x": X.astype(np.float64), "y": X}, "input 'x': it is f64[8]; expected f32[8]"),
        (None, {"x": X.astype(np.complex64), "y": X}, "input 'x': it is complex64[8]; expected f32[8]"),
        (None, {"x": X.astype(str), "y": X}, "input 'x': it is <U32[8]; expected f32[8]"),
        (None, {"x": X[:, None], "y": X}, "input 'x': it is f32[8,1]; expected f32[8]"),
        (
            None,
            {"x": [1.0] * 8, "y": X},
            "input 'x': it is of type list; expected f32[8] as an array of NumPy, or one that supports DLPack",
        ),
    ],
)
def test_wrong_names_shapes_and_types_are_refused(names, feeds, text, make_executable):
    executable = make_executable(plans.several_outputs())
    with pytest.raises(InputError) as caught:
        executable.run(names, feeds)
    assert str(caught.value) == text


def test_a_call_with_too_few_arrays_or_with_run_options_is_refused(make_executable):
    executable = make_executable(plans.several_outputs())
    with pytest.raises(InputError) as caught:
        executable(X)
    assert str(caught.value) == "it was called with 1 arrays; expected 2: 'x', 'y'"
    with pytest.raises(InputError) as caught:
        executable.run(None, {"x": X, "y": X}, object())
    assert str(caught.value) == "run_options is for ONNX Runtime only; expected None"


def test_a_call_takes_arrays_by_name(make_executable):
    executable = make_executable(plans.several_outputs())
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(info.shape).astype(np.float32) for info in executable.get_inputs())
    for by_name, by_position in zip(executable(y=y, x=x), executable(x, y), strict=True):
        np.testing.assert_array_equal(by_name, by_position)
    with pytest.raises(InputError) as caught:
        executable(x, y=y)
    assert str(caught.value) == (
        "1 arrays are given by position and 'y' by name; expected all by position or all by name"
    )
    with pytest.raises(InputError, match="there is no input 'image'; expected an array for each of 'x', 'y'"):
        executable(image=x)


def _unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        np.asfortranarray,
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(x.dtype.newbyteorder()),
        _unaligned,
        lambda x: np.broadcast_to(x[0], x.shape),
    ],
    ids=["step", "fortran", "reversed", "byteorder", "unaligned", "broadcast"],
)
def test_arrays_in_any_order_of_memory_are_taken(change, make_executable):
    plan = plans.chain()
    x = change(np.arange(15, dtype=np.float32).reshape(3, 5) / 8)
    assert_same(make_executable(plan)(x), plan.meaning(np.array(x, np.float32)))


class Foreign:
    """An array of another library: all that it has is DLPack."""

    def __init__(self, array, error=None):
        self.array, self.error = array, error

    def __dlpack__(self, **options):
        if self.error is not None:
            raise self.error
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_come_in_and_go_out_through_dlpack(make_executable):
    plan = plans.chain()
    executable = make_executable(plan)
    x = np.ones((3, 5), np.float32)
    (y,) = executable(Foreign(x))
    assert_same([np.from_dlpack(y)], plan.meaning(x))
    with pytest.raises(InputError) as caught:
        executable(Foreign(x, BufferError("it is on a GPU")))
    assert str(caught.value) == (
        "input 'x': it can't be read through DLPack: it is on a GPU; expected f32[3,5] in this machine's memory"
    )
    with pytest.raises(InputError, match=r"it is f32\[15\]; expected f32\[3,5\]"):
        executable(Foreign(x.reshape(15)))


def test_large_outputs_are_new_arrays_aligned_to_a_cache_line(make_executable):
    executable = make_executable(parallel_plan())
    x = np.zeros(SIZE, np.float32)
    (first,), (second,) = executable(x), executable(x + 1)
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    np.testing.assert_array_equal(first, x)


def test_the_arena_and_the_constants_are_aligned(make_executable):
    plan = plans.blocked_constant()
    check = plans.run_source("k_check", "for (int i = 0; i < 2; ++i) if ((size_t)buffers[i] % 64) return 1;")
    bad = replace(plan.steps[1], kernel=replace(plan.steps[1].kernel, symbol="k_check", source=check))
    make_executable(replace(plan, steps=(plan.steps[0], bad)))(np.zeros((1, 5, 2, 2), np.float32))


def test_several_threads_may_call_at_once(make_executable):
    plan = plans.workspace()
    executable = make_executable(plan)
    wrong = []

    def call(seed):
        for i in range(200):
            x = np.full(64, seed * 1000 + i, np.float32)
            if not np.array_equal(executable(x)[0], plan.meaning(x)[0]):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_each_step_has_a_state_of_its_own_that_is_destroyed_with_the_executable(make_executable):
    destroyed = ctypes.c_long()
    executable = make_executable(plans.state(ctypes.addressof(destroyed)))
    executable(np.zeros(4, np.float32))
    assert destroyed.value == 0
    del executable
    gc.collect()
    assert destroyed.value == 2


def test_a_kernel_that_cant_be_set_up_is_named_and_the_others_are_destroyed(make_executable):
    destroyed = ctypes.c_long()
    plan = plans.failing_create("no such primitive")
    steps = (plans.state(ctypes.addressof(destroyed)).steps[0], plan.steps[1])
    with pytest.raises(ProviderError) as caught:
        make_executable(replace(plan, steps=steps))
    assert str(caught.value) == "executable: it can't be set up: kernel k_bad: no such primitive. Build it again"
    assert destroyed.value == 1


def test_a_kernel_that_gives_no_reason_is_named_too(make_executable):
    with pytest.raises(ProviderError) as caught:
        make_executable(plans.failing_create(""))
    assert "kernel k_bad: its create function gave no reason" in str(caught.value)


def test_a_kernel_that_fails_is_named_and_the_executable_stays_usable(make_executable):
    executable = make_executable(plans.failing_run())
    with pytest.raises(ProviderError) as caught:
        executable(np.full((3, 5), 10, np.float32))
    assert str(caught.value) == (
        "kernel k_fails: it failed while it ran. "
        "An index that the model computes may be out of range; `korch doctor` checks libraries"
    )
    executable(np.zeros((3, 5), np.float32))
    with pytest.raises(ProviderError, match="k_fails"):
        executable.time([np.full((3, 5), 10, np.float32)], 1)


def test_time_gives_each_run_and_each_kernel(make_executable):
    timing = make_executable(plans.chain()).time([np.zeros((3, 5), np.float32)], 7)
    assert len(timing.run_ns) == len(timing.kernel_ns) == 7
    for run_ns, kernel_ns in zip(timing.run_ns, timing.kernel_ns, strict=True):
        assert len(kernel_ns) == 3
        assert 0 <= sum(kernel_ns) <= run_ns


def test_the_callers_number_of_threads_is_left_as_it_was(make_executable):
    executable = make_executable(plans.state())
    before = runtime().korch_set_threads(5)
    try:
        executable(np.zeros(4, np.float32))
        assert runtime().korch_max_threads() == 5
    finally:
        runtime().korch_set_threads(before)


def test_kernels_run_with_the_plans_number_of_threads(make_executable):
    plan = plans.scalar()
    source = plans.run_source("k_threads", "*(float *)buffers[1] = korch_max_threads();")
    asks = replace(plan.steps[0], kernel=Kernel("k_threads", source))
    (found,) = make_executable(replace(plan, steps=(asks,)))(np.array(0, np.float32))
    assert found == plans.TARGET.threads


def test_kernels_of_another_plan_are_refused(make_artifact):
    artifact = make_artifact(plans.chain())
    other = make_artifact(plans.scalar())
    with pytest.raises(ArtifactError) as caught:
        Executable(replace(artifact, objects=other.objects))
    assert str(caught.value) == "its kernels are not those that its plan describes"


@pytest.mark.parametrize("objects", [{"generic": b"not an archive"}, {"generic": b"!<arch>\n" + b"x" * 70}])
def test_what_is_no_archive_of_objects_is_refused(objects, make_artifact):
    artifact = make_artifact(plans.chain())
    with pytest.raises(ArtifactError, match="its kernels can't be loaded: the archive of objects is damaged"):
        Executable(replace(artifact, objects=objects))


def test_kernels_without_plans_are_refused(make_artifact):
    artifact = make_artifact(plans.chain())
    with pytest.raises(ArtifactError, match="its kernels have no plans"):
        Executable(replace(artifact, objects={"generic": pack_objects([])}))


@pytest.mark.parametrize(("isas", "text"), [((), "no CPU"), (("neither", "nor"), "neither, nor")])
def test_kernels_for_other_cpus_are_refused(isas, text, make_artifact):
    artifact = make_artifact(plans.chain())
    with pytest.raises(ArtifactError) as caught:
        Executable(replace(artifact, objects=dict.fromkeys(isas, b"")))
    assert str(caught.value) == f"it has kernels for {text}, which this CPU can't run. Build it on this machine"


def test_the_best_kernels_that_the_cpu_can_run_are_taken(make_artifact):
    artifact = make_artifact(plans.chain())
    several = replace(artifact, objects={"nonsense": b"", **artifact.objects})
    assert_same(
        Executable(several)(*plans.random_arrays(plans.chain().graph)),
        Executable(artifact)(*plans.random_arrays(plans.chain().graph)),
    )


def test_equal_layouts_are_one(make_executable):
    # One pixel: channels-last has the same bytes as plain, so no change of layout is needed.
    builder, x = plans.new_graph(x="f32[1,4,1,1]")
    builder.output("y", builder.add("neg", [x]))
    graph = builder.freeze()
    last = Layout((0, 2, 3, 1))
    kernel = plans.loop("k_neg_last", 4, "o0[i] = -i0[i];")
    one = plans.step(graph, [graph.outputs[0][1]], kernel, into=(last,), out_of=(last,))
    plan = plans.Plan(graph, (one,), lambda x: (-x,))
    x = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    assert_same(make_executable(plan)(x), (-x,))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mapped_code():
    """The addresses of code that is not from a file."""
    with Path("/proc/self/maps").open() as lines:
        rows = [line.split() for line in lines]
    return {row[0] for row in rows if row[1] == "r-xp" and len(row) == 5}


def test_code_is_unloaded_with_the_last_executable_that_needs_it(make_artifact):
    artifact = make_artifact(plans.chain())
    gc.collect()  # else code of earlier tests may be unloaded below, and other code take its addresses
    before = mapped_code()
    executables = [Executable(artifact) for _ in range(3)]
    new = mapped_code() - before
    assert len(new) == 3
    arrays = plans.random_arrays(plans.chain().graph)
    (expected,) = executables[0](*arrays)
    del executables[1:]
    gc.collect()
    np.testing.assert_array_equal(executables[0](*arrays)[0], expected)
    assert len(new & mapped_code()) == 1
    del executables
    gc.collect()
    assert not new & mapped_code()


@pytest.mark.parametrize("threads", [-1, 100_000])
def test_a_plan_for_an_impossible_number_of_threads_is_refused(threads, make_artifact):
    artifact = make_artifact(plans.chain())
    with pytest.raises(ProviderError, match=f"it is for {threads} threads; expected 1 to 1024"):
        Executable(replace(artifact, plan=replace(artifact.plan, threads=threads)))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_archive_is_refused(share, make_artifact):
    artifact = make_artifact(plans.chain())
    part = artifact.objects["generic"][: int(share * len(artifact.objects["generic"]))]
    with pytest.raises(ArtifactError, match="its kernels can't be loaded: the archive of objects is damaged"):
        Executable(replace(artifact, objects={"generic": part}))


def test_memory_is_zero_and_takes_none_before_it_is_used(make_artifact):
    builder, x = plans.new_graph(x="f32[4]")
    value = builder.add("neg", [x])
    builder.output("y", value)
    graph = builder.freeze()
    body = "o0[i] = w[i << 22]; w[i << 22] = i0[i];"
    kernel = plans.loop("k_keep", 4, body, workspace_bytes=64 << 20)
    artifact = make_artifact(plans.Plan(graph, (plans.step(graph, [value], kernel),), lambda x: (-x,)))
    before = resident_bytes()
    executables = [Executable(artifact) for _ in range(4)]
    assert resident_bytes() - before < 64 << 20
    x = np.arange(4, dtype=np.float32)
    for executable in executables:
        np.testing.assert_array_equal(executable(x)[0], np.zeros(4))
        np.testing.assert_array_equal(executable(-x)[0], x)
    del executables, executable
    gc.collect()
    assert resident_bytes() - before < 16 << 20
