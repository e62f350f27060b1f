"""One executable for several shapes: the right plan is chosen, and weights are stored once."""

import copy
import gc
import hashlib
import json
import pickle
import re
import threading
import weakref
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from korch.cli import main
from korch.cli.shapes import parse_bindings
from korch.errors import ArtifactError, InputError, ModelError, OptionError, UnsupportedError
from korch.runtime.combine import Combined
from korch.runtime.shaped import ShapedExecutable
from korch.runtime.unpack import unpack
from tests.runtime import runtime_plans as plans
from tests.support.c_session import Session
from tests.support.models import parsed

QUICK = {"measure": False, "threads": 1}
WIDTH = 48


def attention_like() -> onnx.ModelProto:
    """x[batch, length, w] @ W, a mask[length, length] of scores, softmax, and back."""
    weight = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 7
    text = f"""(float[batch,length,{WIDTH}] x, float[length,length] mask) => (float[batch,length,{WIDTH}] y) {{
        q = MatMul(x, w)
        k = Transpose<perm = [0, 2, 1]>(x)
        s = MatMul(q, k)
        m = Add(s, mask)
        p = Softmax<axis = -1>(m)
        r = MatMul(p, x)
        shape = Shape(x)
        t = Reshape(r, shape)
        y = Add(t, x)
    }}"""
    return parsed(text, w=weight)


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.where(np.tri(length) > 0, 0, -np.inf).astype(np.float32)
    return {"x": rng.standard_normal((batch, length, WIDTH)).astype(np.float32), "mask": mask}


@pytest.fixture(scope="module")
def executable(cache_folder) -> ShapedExecutable:
    bindings = [{"batch": 1, "length": n} for n in (5, 8, 1)] + [{"batch": 2, "length": 8}]
    found = korch.optimize(attention_like(), shapes=bindings, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, ShapedExecutable)
    return found


SHAPES = [(1, 5), (1, 8), (1, 1), (2, 8)]


def check(executable: ShapedExecutable, batch: int, length: int) -> None:
    given = feeds(batch, length)
    session = onnxruntime.InferenceSession(attention_like().SerializeToString())
    (expected,) = session.run(None, given)
    (found,) = executable.run(None, given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(executable(given["x"], given["mask"])[0], found)


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_the_plan_is_picked_by_the_shapes(executable, batch, length) -> None:
    check(executable, batch, length)


def test_an_unplanned_shape_lists_the_planned_ones(executable) -> None:
    with pytest.raises(InputError) as caught:
        executable.run(None, feeds(1, 7))
    assert str(caught.value) == (
        "no plan was made for inputs of the shapes 1x7x48, 7x7; expected one of 1x5x48, 5x5; "
        "1x8x48, 8x8; 1x1x48, 1x1; 2x8x48, 8x8. Optimize the model again with these shapes too "
        "(--shape)"
    )


def test_inputs_are_described_with_the_planned_sizes(executable) -> None:
    assert [(t.name, t.shape) for t in executable.get_inputs()] == [
        ("x", ["1|2", "5|8|1", WIDTH]),
        ("mask", ["5|8|1", "5|8|1"]),
    ]
    assert executable.get_outputs()[0].shape == ["1|2", "5|8|1", WIDTH]
    lines = repr(executable).splitlines()
    assert lines[0] == "<ShapedExecutable 4 plans by shape"
    assert re.match(rf"  \(?1x5x{WIDTH}, .*: a model: \d+ kernels? on 1 thread, [\d.]+ ms measured", lines[1])
    assert lines[5] == f"  input 'x': tensor(float) ['1|2', '5|8|1', {WIDTH}]"


def test_saved_and_loaded_it_is_the_same_and_the_weights_are_there_once(executable, tmp_path: Path) -> None:
    path, again = tmp_path / "a.korch", tmp_path / "b.korch"
    executable.save(path)
    loaded = korch.load(path)
    assert isinstance(loaded, ShapedExecutable)
    for batch, length in SHAPES:
        check(loaded, batch, length)
    blocks = {e.artifact.weights.block.ctypes.data for e in loaded.plans.values()}
    assert len(blocks) == 1
    loaded.save(again)
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_it_is_copied_and_pickled(copied, executable) -> None:
    again = copied(executable)
    assert isinstance(again, ShapedExecutable) and again is not executable
    for shapes in SHAPES:
        check(again, *shapes)
    assert again.report == executable.report


def test_weights_and_kernels_are_there_once(cache_folder) -> None:
    """x[n, w] @ W + s[1, w] @ W: what makes the second product does not depend on n."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 7
    text = f"""(float[n,{WIDTH}] x, float[1,{WIDTH}] s) => (float[n,{WIDTH}] y) {{
        a = MatMul(x, w)
        b = MatMul(s, w)
        p = Softmax(b)
        y = Add(a, p)
    }}"""
    model = parsed(text, w=weight)
    executable = korch.optimize(model, shapes=[{"n": 3}, {"n": 20}], cache_folder=cache_folder, **QUICK)
    for n in (3, 20):
        x, s = (rng.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (n, 1))
        e = np.exp((s @ weight).astype(np.float64))
        np.testing.assert_allclose(executable(x, s)[0], x @ weight + e / e.sum(), atol=1e-4)
    report, plans = executable.report, list(executable.plans.values())
    assert report.shared_weights_bytes < report.weights_bytes
    symbols = [step.symbol for e in plans for step in e.plan.steps]
    assert len(set(symbols)) < len(symbols)
    assert (report.kernels, report.shared_kernels) == (len(symbols), len(set(symbols)))
    assert len({id(e.artifact.objects) for e in plans}) == 1
    kernels = [name for name in plans[0].sources if name.startswith("k_") and name.endswith(".ll")]
    assert sorted(name.partition(".")[0] for name in kernels) == sorted(set(symbols))


def test_one_of_several_plans_is_not_saved_alone(executable, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="can't be saved without the others"):
        next(iter(executable.plans.values())).save(tmp_path / "one.korch")


def test_a_program_in_c_finds_the_plans(executable, tmp_path: Path) -> None:
    executable.save(tmp_path / "m.korch")
    folder = tmp_path / "folder"
    unpack(tmp_path / "m.korch", folder)
    session = Session(folder, 1)
    for batch, length in (*SHAPES, *SHAPES):
        given = feeds(batch, length)
        np.testing.assert_array_equal(session.run(list(given.values()))[0], executable.run(None, given)[0])
    with pytest.raises(ValueError, match=r"input x, axis \d: its size is 7; expected \d+$"):
        session.run([given["x"][:, :7], given["mask"]])
    session.close()
    for name in ("sizes.bin", "weights.bin", "kernels.a"):
        (folder / name).rename(tmp_path / name)
        with pytest.raises(ValueError, match=re.escape(f"can't read {folder / name}")):
            Session(folder, 1)
        (tmp_path / name).rename(folder / name)
    sizes = (folder / "sizes.bin").read_bytes()
    for damaged in (b"", sizes[:16], sizes[:-16], sizes[:-1], bytes([sizes[0] ^ 1]) + sizes[1:], bytes(len(sizes))):
        (folder / "sizes.bin").write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(f"{folder}/sizes.bin is damaged")):
            Session(folder, 1)
    (folder / "sizes.bin").write_bytes(sizes)
    Session(folder, 1).close()
    (folder / "weights.bin").write_bytes(bytes(64))
    with pytest.raises(ValueError, match=re.escape(f"{folder}/weights.bin has not the weights of these plans")):
        Session(folder, 1)


def test_several_threads_call_different_plans(executable) -> None:
    failures = []

    def work(batch: int, length: int) -> None:
        try:
            for _ in range(5):
                check(executable, batch, length)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=shape) for shape in SHAPES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_damage_is_refused(executable, tmp_path: Path) -> None:
    path = tmp_path / "a.korch"
    executable.save(path)
    content = path.read_bytes()
    step = len(content) // 40
    for at in range(200, len(content), step):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            loaded = korch.load(path)
        except (ArtifactError, UnsupportedError):
            continue
        check(loaded, 1, 5)  # a byte that means nothing: a name's date in the archive
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match=r"truncated or damaged|is no Korch artifact"):
        korch.load(path)


@pytest.mark.parametrize("places", [[], [[10_000], [0]], [[-1], [0]], 7])
def test_weights_that_are_not_there_are_refused(executable, tmp_path: Path, places) -> None:
    path = tmp_path / "a.korch"
    executable.save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["program.json"] = json.dumps({"weights": places}).encode()
    manifest = json.loads(members["manifest.json"])
    manifest["sha256"]["program.json"] = hashlib.sha256(members["program.json"]).hexdigest()
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    for read in (korch.load, lambda path: unpack(path, tmp_path / "folder")):
        with pytest.raises(ArtifactError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: it is truncated or damaged. Build the artifact again"


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        (
            [{"batch": 1, "length": 5}, {"length": 5, "x": (1, 5, WIDTH)}],
            OptionError,
            "two bindings give the inputs the same shapes, 1x5x48, 5x5",
        ),
        ([], OptionError, "there is no binding"),
        ([{"batch": 1, "length": 5}, {"length": 5, "batch": 1}], OptionError, "two bindings are equal"),
        (
            {"batch": 1, "lenght": 5},
            OptionError,
            "no named dimension 'lenght'; expected one of 'x', 'mask', or a dimension: 'batch', 'length'",
        ),
        ([{"batch": 1}, {"batch": 2}], ModelError, "dimension 1, 'length', is unknown"),
        ({"batch": (1, 2), "length": 5}, OptionError, "the dimension 'batch' can't be 1x2"),
        ({"batch": -1, "length": 5}, OptionError, "the dimension 'batch' can't be -1"),
        ({"length": 6, "x": (1, 5, WIDTH)}, OptionError, "dimension 1, 'length', is 5"),
        ({"batch": 1, "length": 5, "mask": (5, 6)}, OptionError, "dimension 1, 'length', is 6"),
    ],
)
def test_bindings_that_make_no_sense(shapes, error, text, cache_folder) -> None:
    with pytest.raises(error) as caught:
        korch.optimize(attention_like(), shapes=shapes, cache_folder=cache_folder, **QUICK)
    assert text in str(caught.value)


def test_alternatives_on_the_command_line_go_together() -> None:
    assert parse_bindings(["batch=1", "length=5,8", "mask=5x5,8x8"]) == [
        {"batch": (1,), "length": (5,), "mask": (5, 5)},
        {"batch": (1,), "length": (8,), "mask": (8, 8)},
    ]
    assert parse_bindings([]) == [{}]
    with pytest.raises(OptionError, match="'a' is given twice"):
        parse_bindings(["a=1", "a=2"])
    with pytest.raises(OptionError, match="different numbers of alternatives: a 2, b 3"):
        parse_bindings(["a=1,2", "b=1,2,3"])


def test_the_command_line_builds_explains_and_runs_it(
    tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "m.onnx", tmp_path / "m.korch"
    model.write_bytes(attention_like().SerializeToString())
    common = ["--no-measure", "--threads", "1", "--cache-folder", str(cache_folder)]
    shapes = ["--shape", "batch=1", "--shape", "length=5,8"]
    assert main(["optimize", str(model), "-o", str(out), *shapes, *common]) == 0
    assert main(["explain", str(out)]) == 0
    assert "inputs of 1x8x48, 8x8: " in capsys.readouterr().out
    given = feeds(1, 8)
    for name, array in given.items():
        np.save(tmp_path / f"{name}.npy", array)
    arguments = [f"--input={name}={tmp_path / name}.npy" for name in given]
    assert main(["run", str(out), *arguments, "--repeat", "2"]) == 0
    assert "y: f32[1, 8, 48]" in capsys.readouterr().out
    assert main(["run", str(out), "--random"]) == 0
    assert "y: f32[1, 5, 48]" in capsys.readouterr().out
    assert main(["run", str(out), "--random", "--shape", "x=1x8x48"]) == 0
    assert "y: f32[1, 8, 48]" in capsys.readouterr().out
    assert main(["explain", str(out), "--shape", "x=1x8x48"]) == 0
    assert "what it computes (layouts)" in capsys.readouterr().out
    bench = ["bench", str(out), "--model", str(model), "--against", "", "--rounds", "1"]
    assert main([*bench, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bindings"]
    assert [one["shapes"]["x"] for one in found] == [[1, 5, 48], [1, 8, 48]]
    assert [row["name"] for one in found for row in one["rows"]] == ["korch", "korch"]
    assert main([*bench, "--shape", "x=1x8x48"]) == 0
    assert main([*bench, "--shape", "x=1x9x48"]) == 1
    assert "0 plans of" in capsys.readouterr().err


def test_plans_that_were_taken_keep_only_their_new_weights(make_executable, builder):
    combined, kept = Combined(), []
    for make in (plans.blocked_constant, plans.chain, plans.blocked_constant):
        executable = make_executable(make())
        kept.append(weakref.ref(executable.artifact.weights))
        combined.take([executable])
    del executable
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    artifacts, shared = combined.finish(builder)
    assert shared.places == [[0, 1], [], [0, 1]]
    found = ShapedExecutable(artifacts, shared)
    for make, one in zip((plans.blocked_constant, plans.chain, plans.blocked_constant), found.executables, strict=True):
        arrays = plans.random_arrays(make().graph)
        for output, wanted in zip(one(*arrays), make().meaning(*arrays), strict=True):
            np.testing.assert_allclose(output, wanted, rtol=1e-6)
