"""Artifacts that are unpacked to folders for C programs. `tests/test_docs.py` compiles and runs such a program."""

import errno
import hashlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import korch
from korch.cli import main
from korch.errors import ArtifactError, OptionError, UnsupportedError
from korch.inputs import random_arrays
from korch.primitive.types import ValueType
from korch.ranges.cost import Cost, Term
from korch.ranges.form import Dimension, Factor, extent
from korch.ranges.plan import AtSizes, RangePlan
from korch.runtime import unpack as unpack_module
from korch.runtime.artifact import archive_of
from korch.runtime.combine import combine
from korch.runtime.library import Handle, load_plans
from korch.runtime.machine import cpu_flags
from korch.runtime.ranged import RangedExecutable, Ranges
from korch.runtime.unpack import unpack, weight_chunks
from korch.runtime.weights import Weights
from korch.system.libraries import find_onnxruntime
from korch.target import REQUIRED_FLAGS
from tests.ranges.range_models import model_of, shapes_of
from tests.ranges.test_sweep import MODELS, RANGES, sizes_of
from tests.runtime import runtime_plans as plans
from tests.support.c_session import Session
from tests.support.models import parsed


@pytest.fixture
def pack(make_artifact, tmp_path):
    """Write a plan's artifact; return its path."""

    def write(plan):
        archive_of(make_artifact(plan)).write(tmp_path / "plan.korch")
        return tmp_path / "plan.korch"

    return write


def linked(source, opens):
    builder, x = plans.new_graph(x="f32[1]")
    builder.output("y", builder.add("neg", [x]))
    graph = builder.freeze()
    kernel = plans.Kernel("k_linked", source, opens=opens)
    steps = (plans.step(graph, [graph.outputs[0][1]], kernel),)
    return plans.Plan(graph, steps, lambda x: (-x,))


def constants_of(folder, counts):
    """Return weights.bin's offsets per plan, and its bytes, as korch.h says that they are read."""
    block = np.fromfile(folder / "weights.bin", np.uint8)
    table = block[: 8 * (1 + sum(counts))].view(np.int64)
    assert table[0] == sum(counts) and not (table[1:] % 64).any()
    ends = np.cumsum([1, *counts])
    return [table[a:b].tolist() for a, b in itertools.pairwise(ends)], block


def run_folder(folder, i, *arrays):
    """Run plan i of a folder on arrays, with nothing but what lies in the folder."""
    found = load_plans({"generic": (folder / "kernels.a").read_bytes()})
    offsets, block = constants_of(folder, [len(plan.constants) for plan in found])
    aligned = Weights.allocate([ValueType((block.size,), plans.DType.U8)])
    aligned.block[: block.size] = block
    types = tuple(type_ for _, type_ in found[i].constants)
    handle = Handle(found[i], Weights(types, tuple(offsets[i]), aligned.block), threads=1)
    outputs = [np.empty(t.shape, t.dtype.numpy) for _, t in found[i].outputs]
    handle.run([a.ctypes.data for a in arrays], [a.ctypes.data for a in outputs])
    return outputs


@pytest.mark.parametrize("plan", [plans.blocked_constant, plans.chain, plans.several_outputs])
def test_the_folder_runs_as_the_artifact_does(pack, tmp_path, plan):
    plan = plan()
    path = pack(plan)
    unpack(path, tmp_path / "made" / "folder")
    arrays = plans.random_arrays(plan.graph)
    found = run_folder(tmp_path / "made" / "folder", 0, *arrays)
    for one, other in zip(found, korch.load(path)(*arrays), strict=True):
        np.testing.assert_array_equal(one, other)


def test_kernels_for_another_cpu_are_refused(pack, tmp_path, monkeypatch):
    flag = max(cpu_flags(), key=len)
    monkeypatch.setitem(REQUIRED_FLAGS, "generic", (flag,))
    unpack(pack(plans.chain()), tmp_path / "folder")
    Session(tmp_path / "folder", 1).close()
    kernels = tmp_path / "folder" / "kernels.a"
    kernels.write_bytes(kernels.read_bytes().replace(f"{flag} \0".encode(), b"x" * len(flag) + b" \0"))
    with pytest.raises(ValueError, match=f"{kernels.parent} needs a CPU with {'x' * len(flag)}"):
        Session(tmp_path / "folder", 1)


def test_the_manifest_says_what_is_needed_and_seals_the_rest(pack, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()  # an empty one is taken
    found = unpack(pack(plans.blocked_constant()), folder)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {"manifest.json", *manifest["sha256"]}
    assert {
        "libkorch_runtime.so",
        "kernels.a",
        "korch.h",
        "weights.bin",
        "sizes.bin",
        "plans/0.json",
        "sources/plans.ll",
    } < files
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert manifest["threads"] == found.threads == 2
    assert manifest["requires"]["cpu_flags"] == list(found.cpu_flags) == []
    (plan,) = manifest["plans"]
    assert [tensor["name"] for tensor in plan["inputs"]] == ["x"]
    assert found.files == {name: (folder / name).stat().st_size for name in found.files}
    assert found.brought == found.missing == ()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_constants_are_shared_between_plans():
    weights = Weights.allocate([ValueType((3,), plans.DType.F32), ValueType((5,), plans.DType.I8)])
    weights.array(0)[...], weights.array(1)[...] = [1.5, 2.5, 3.5], range(5)
    content = b"".join(weight_chunks(weights, [[1], [0, 1]]))
    table = np.frombuffer(content[:32], np.int64).tolist()
    assert table == [3, 128, 64, 128]
    assert np.frombuffer(content[64:76], np.float32).tolist() == [1.5, 2.5, 3.5]
    assert content[128:133] == bytes(range(5))
    assert b"".join(weight_chunks(Weights.allocate([]), [[]])) == bytes(64)


def test_several_plans(tmp_path, cache_folder):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    model = parsed("(float[n,8] x) => (float[n,8] y) { y = MatMul(x, w) }", w=weight)
    executable = korch.optimize(
        model, shapes=[{"n": 3}, {"n": 20}], cache_folder=cache_folder, measure=False, threads=1
    )
    executable.save(tmp_path / "two.korch")
    unpack(tmp_path / "two.korch", tmp_path / "two")
    assert sorted(p.name for p in (tmp_path / "two" / "plans").iterdir()) == ["0.json", "1.json"]
    for i, n in enumerate((3, 20)):
        x = rng.standard_normal((n, 8)).astype(np.float32)
        (found,) = run_folder(tmp_path / "two", i, x)
        np.testing.assert_array_equal(found, executable(x)[0])


@pytest.mark.parametrize(
    "name",
    [
        "attention bn",
        "std n",
        "positions n",
        "shift n",
        "first half hw",
        "pad reflect n",
        "rolled windows hw",
        "pool over a concatenation hw",
        "slice of a concatenation n",
        "gru state n",
        "last n",
    ],
)
def test_a_range_of_sizes(tmp_path, cache_folder, name):
    shapes = shapes_of(name, RANGES)
    ranges = {key: bounds[0] for key, bounds in shapes.items()}
    quick = {"measure": False, "threads": 1, "ablation": korch.Ablation(baselines=False, rules="none")}
    quick["search"] = korch.SearchLimits(max_primitives=8, max_outputs=1)
    executable = korch.optimize(model_of(*MODELS[name]), shapes=ranges, cache_folder=cache_folder, **quick)
    executable.save(tmp_path / "m.korch")
    unpack(tmp_path / "m.korch", tmp_path / "m")
    session = Session(tmp_path / "m", len(executable.get_outputs()))
    for sizes in sizes_of(shapes):
        infos = executable.inputs_at(sizes)
        feeds = random_arrays({info.name: (tuple(info.shape), info.dtype) for info in infos}, sum(sizes))
        for one, other in zip(session.run(list(feeds.values())), executable.run(None, feeds), strict=True):
            np.testing.assert_array_equal(one, other)
    session.close()


def test_a_measured_size_has_the_plan_that_python_takes(make_executable, builder, tmp_path):
    def constant(number):
        graph_builder, x = plans.new_graph(x="f32[4]")
        graph_builder.output("y", graph_builder.add("neg", [x]))
        graph, symbol = graph_builder.freeze(), f"k_constant{number}"
        source = plans.run_source(symbol, f"for (int i = 0; i < 4; ++i) ((float *)buffers[1])[i] = {number};")
        step = plans.step(graph, [graph.outputs[0][1]], plans.Kernel(symbol, source))
        return make_executable(plans.Plan(graph, (step,), None))

    form = ((((Factor(4, extent(0))),),),)
    first, second = (
        RangePlan((4,), form, form, costs=(Cost((1,), (Term((0,), cost),)),), measured=(AtSizes((2,), ns, 100, 50),))
        for cost, ns in ((1.0, 110), (2.0, 100))
    )
    artifacts, shared = combine([constant(i) for i in range(2)], builder)
    executable = RangedExecutable(artifacts, shared, Ranges((Dimension("n", None, 1, 4),), (first, second)))
    executable.save(tmp_path / "m.korch")
    unpack(tmp_path / "m.korch", tmp_path / "m")
    session = Session(tmp_path / "m", 1)
    for n, number in ((1, 0), (2, 1), (3, 0), (4, 0)):
        x = np.zeros(n, np.float32)
        assert session.run([x])[0].tolist() == executable(x)[0].tolist() == [number] * n
    session.close()


@pytest.mark.skipif(find_onnxruntime() is None, reason="ONNX Runtime is not installed")
def test_libraries_go_along(pack, tmp_path):
    source = plans.run_source("k_linked", "*(float *)buffers[1] = -*(float *)buffers[0];")
    found = unpack(pack(linked(source, ("onnxruntime",))), tmp_path / "folder")
    assert found.brought == ("libonnxruntime.so.1",)


def test_a_library_of_the_system_is_named(pack, tmp_path):
    source = plans.run_source("k_linked", "*(float *)buffers[1] = -*(float *)buffers[0];")
    found = unpack(pack(linked(source, ("m",))), tmp_path / "folder")
    assert found.missing == ("m",)
    assert "  m must be installed where it runs" in found.to_text().splitlines()
    assert json.loads((tmp_path / "folder" / "manifest.json").read_text("utf-8"))["libraries"] == ["m"]


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_there_is_kept(pack, tmp_path, is_file):
    folder = tmp_path / "folder"
    if is_file:
        folder.write_text("kept")
    else:
        folder.mkdir()
        (folder / "own").write_text("kept")
    with pytest.raises(OptionError) as caught:
        unpack(pack(plans.chain()), folder)
    assert str(caught.value) == (
        f"option FOLDER: {folder} exists and is not an empty folder. Choose another name, or remove it first"
    )
    assert (folder if is_file else folder / "own").read_text("utf-8") == "kept"


@pytest.mark.parametrize("name", ["../own.ll", "/own.ll", "a/own.ll", ".."])
def test_sources_stay_in_the_folder(make_artifact, tmp_path, name):
    artifact = make_artifact(plans.chain())
    path = tmp_path / "plan.korch"
    archive_of(replace(artifact, sources={name: "kept"})).write(path)
    with pytest.raises(ArtifactError) as caught:
        unpack(path, tmp_path / "a" / "folder")
    assert str(caught.value) == (
        f"{path}: a source has the name {name!r}; expected the name of a file. Build the artifact again"
    )
    assert [p.name for p in tmp_path.rglob("*")] == ["plan.korch"]


def test_a_full_disk_leaves_nothing(pack, tmp_path, monkeypatch):
    path, write = pack(plans.chain()), unpack_module._write

    def fail(file, chunks):
        write(file, chunks)
        if file.name == "weights.bin":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unpack_module, "_write", fail)
    with pytest.raises(ArtifactError) as caught:
        unpack(path, tmp_path / "folder")
    assert str(caught.value) == (
        f"{tmp_path / 'folder'}: it can't be written: No space left on device. Choose a folder "
        "that may be written to and has room"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["plan.korch"]


@pytest.mark.parametrize("kind", ["korch-hosted", "korch-cuda"])
def test_what_needs_python_is_refused(tmp_path, kind):
    path = tmp_path / "other.korch"
    path.write_text(json.dumps({"format": kind}))
    with pytest.raises(UnsupportedError) as caught:
        unpack(path, tmp_path / "folder")
    assert str(caught.value) == (
        f"{path}: it is for a CUDA device, or parts of it run on the host: only Python runs it; "
        "expected an artifact for the CPU without parts on the host"
    )
    assert not (tmp_path / "folder").exists()


def test_the_command(pack, tmp_path, capsys):
    assert main(["unpack", str(pack(plans.blocked_constant())), str(tmp_path / "folder")]) == 0
    first, *files = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'folder'}: for 2 threads on a CPU with no special instructions"
    assert [line.split()[0] for line in files] == [
        "libkorch_runtime.so",
        "korch.h",
        "kernels.a",
        "weights.bin",
        "sizes.bin",
    ]
    text = tmp_path / "text.korch"
    text.write_text("no artifact")
    assert main(["unpack", str(text), str(tmp_path / "other")]) == 1
    expected = "it is no Korch artifact; expected a file that `korch optimize` wrote"
    assert capsys.readouterr().err == f"korch: {text}: {expected}\n"
