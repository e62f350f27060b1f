"""Sessions of a model with states: results are those of the model, whatever rows are run together."""

import copy
import pickle
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from benchmarks.models.decoder import build_decoder
from korch.cli import main
from korch.errors import ArtifactError, InputError, OptionError, ProviderError, UnsupportedError
from korch.frontend.onnx import read_model
from korch.pipeline.stateful import state_sizes
from korch.ranges import free
from korch.ranges.state import PAST, ROWS, TOTAL
from korch.report.peers.artifact import ArtifactPeer
from korch.runtime.executable import Executable
from korch.runtime.generate import Sampling, generate
from korch.runtime.rows import StatefulModel
from korch.runtime.runnable import random_feeds
from korch.runtime.sizes import sizes_of_states
from korch.runtime.stateful import Session, StatefulExecutable, States
from korch.runtime.unpack import unpack
from tests.support.c_code import program_of
from tests.support.c_session import Session as InC
from tests.support.models import parsed

QUICK = {
    "measure": False,
    "threads": 1,
    "ablation": korch.Ablation(baselines=False, rules="none"),
    "search": korch.SearchLimits(max_primitives=4, max_candidates=2000),
}
CAPACITY = 48
SIZES = {"past": range(CAPACITY), "seq": range(1, 25)}

# Rows of x are appended to a state and summed up with those before; the last axis of the state counts its rows.
SUMS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4, n] x, float[4, p] past) => (float[4, n] y, float[4, total] present)
{
    present = Concat <axis = 1> (past, x)
    all = ReduceSum <keepdims = 1> (present, one)
    y = Add(x, all)
}
"""

# Rows are multiplied by a row of a table and by the cosine of their place, and appended; the places follow from sizes.
PLACES = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 4] x, float[p, 4] past) => (float[n, 4] y, float[total, 4] present)
<int64[1] axes = {1}, int64 zero = {0}, int64 one = {1}>
{
    before = Gather(before_shape, zero)
    before_shape = Shape(past)
    new_shape = Shape(x)
    new = Gather(new_shape, zero)
    after = Add(before, new)
    places = Range(before, after, one)
    row = Gather <axis = 0> (table, places)
    real = Cast <to = 1> (places)
    turn = Cos(real)
    column = Unsqueeze(turn, axes)
    scaled = Mul(x, row)
    turned = Mul(scaled, column)
    present = Concat <axis = 0> (past, turned)
    best = ReduceMax <axes = [0]> (present)
    y = Sub(x, best)
}
"""


def placed() -> onnx.ModelProto:
    """Return a model in which the place of a row follows from the number of rows before."""
    proto = onnx.parser.parse_model(PLACES)
    table = np.random.default_rng(0).standard_normal((120, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return proto


def later() -> onnx.ModelProto:
    """Return a model of which each row depends on later rows, too."""
    proto = onnx.parser.parse_model(SUMS.replace("(present, one)", "(present, axes)"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "axes"))
    return proto


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build_decoder("tiny-qwen3")


@pytest.fixture(scope="module")
def executable(model, cache_folder) -> StatefulExecutable:
    found = korch.optimize(model, shapes=SIZES, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    return found


@pytest.fixture(scope="module")
def short() -> tuple[onnx.ModelProto, onnxruntime.InferenceSession]:
    """A model of one layer, which is searched in half the time, and its reference."""
    model = build_decoder("tiny-one-layer")
    return model, onnxruntime.InferenceSession(model.SerializeToString())


@pytest.fixture(scope="module")
def reference(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString())


@pytest.fixture(scope="module")
def sums(cache_folder, tmp_path_factory) -> StatefulExecutable:
    path = tmp_path_factory.mktemp("sums") / "sums.onnx"
    onnx.save(later(), path)
    found = korch.optimize(path, shapes={"p": range(16), "n": range(1, 10)}, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    return found


def feeds(executable: StatefulExecutable, past: int, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(past + rows)
    found: dict[str, np.ndarray] = {}
    for tensor in executable.described.inputs:
        shape = tensor.shape(past, rows)
        if tensor.name == "input_ids":
            found[tensor.name] = rng.integers(0, 256, shape)
        elif tensor.name == "position_ids":
            found[tensor.name] = np.arange(past, past + rows).reshape(shape)
        elif tensor.name == "attention_mask":
            found[tensor.name] = np.ones(shape, np.int64)
        else:
            found[tensor.name] = rng.standard_normal(shape).astype(np.float32)
    return found


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, count))


def test_the_roles_of_dimensions_follow_from_the_model(model) -> None:
    sizes = state_sizes(read_model(model), {"past": (range(9),)})
    assert sizes is not None
    assert sizes.roles == {"past": PAST, "seq": ROWS, "past + seq": TOTAL}
    assert (sizes.past, sizes.fixed, sizes.assumed) == (range(9), {"batch": (1,)}, (ROWS,))
    assert state_sizes(read_model(model), {"past": (9,)}) is None
    with pytest.raises(OptionError, match=r"the size of 'past \+ seq' is that of the rows before and in a run"):
        state_sizes(read_model(model), {"past + seq": (range(1, 9),)})


def test_a_cache_that_is_not_returned_is_named(cache_folder) -> None:
    model = build_decoder("tiny-qwen3")
    del model.graph.output[1]
    message = (
        r"Concat.*: rows are appended to the input 'past_key_values\.0\.value', but no output returns them; expected "
        r"an output for each cache, as 'present\.1\.value' for 'past_key_values\.1\.value'\. Export the model with all"
    )
    for sizes in (None, SIZES):
        with pytest.raises(UnsupportedError, match=message):
            korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)


@pytest.mark.parametrize(
    ("past", "rows"), [(0, 1), (0, 5), (0, 24), (1, 1), (30, 1), (47, 1), (1, 8), (17, 8), (40, 8), (5, 11), (0, 27)]
)
def test_a_call_with_all_states_is_the_model(executable, reference, past, rows) -> None:
    given = feeds(executable, past, rows)
    before = {name: array.copy() for name, array in given.items()}
    for found, wanted in zip(executable.run(None, given), reference.run(None, given), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    assert all(np.array_equal(given[name], array) for name, array in before.items())  # inputs are not overwritten


@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 2e-2), ("float16", 2e-3), ("int8", 2e-2)])
def test_states_are_kept_in_fewer_bits(short, cache_folder, tmp_path, kind, error) -> None:
    (model, reference), sizes = short, {"past": range(20), "seq": range(1, 9)}
    built = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, state=kind, **QUICK)
    assert 0 < built.described.kept_error < error
    built.save(tmp_path / "a.korch")
    executable = korch.load(tmp_path / "a.korch")
    assert executable.facts().startswith(f"sessions of at most 20 rows, states in {kind[:1]}")
    session, ids = executable.session(), tokens(14)
    scales = ["float32"] * 2 if kind == "int8" else []
    assert [array.dtype.name for array in session._memory.arrays] == [kind] * 2 + scales
    found = [session.run(input_ids=ids[:, :8])[0]]
    fork = session.fork()
    found += [session.run(input_ids=ids[:, i : i + 1])[0] for i in range(8, 14)]
    *presents, logits = reference.run(None, feeds(executable, 0, 14) | {"input_ids": ids})
    assert np.abs(np.concatenate(found, 1) - logits).max() < 2 * error * np.abs(logits).max()
    for state, present in zip(session.states(), presents, strict=True):
        assert state.dtype == np.float32
        assert 0 < np.abs(state - present).max() < error * np.abs(present).max()
    again = [fork.run(input_ids=ids[:, i : i + 1])[0] for i in range(8, 14)]
    assert all(np.array_equal(a, b) for a, b in zip(found[1:], again, strict=True))
    fork.truncate(0)
    in_c = c_session(executable, tmp_path)
    for rows in (8, 1, 9):
        assert_equal_rows(executable, (in_c, fork), rows)
    in_c.close()
    given = feeds(executable, 9, 1)
    for found_, wanted in zip(executable.run(None, given), reference.run(None, given), strict=True):
        assert found_.dtype == np.float32
        assert np.abs(found_ - wanted).max() < 2 * error * np.abs(wanted).max()


def test_only_models_in_sessions_keep_states_in_16_bits(cache_folder) -> None:
    with pytest.raises(OptionError, match="option state: the model is not optimized for sessions"):
        korch.optimize(
            build_decoder("tiny-qwen3"),
            shapes={"past": 4, "seq": 1, "batch": 1, "past + seq": 5},
            cache_folder=cache_folder,
            state="bfloat16",
            **QUICK,
        )


def test_steps_are_timed_with_the_new_rows_in_the_states_own_memory(executable) -> None:
    plan = executable.serving(9, 1)
    kept = [plan.plan.inputs[given].name for _, given in plan.plan.extended]
    assert sorted(kept) == sorted(executable.described.inputs[s.input].name for s in executable.described.states)
    arrays = list(random_feeds(plan.get_inputs()).values())
    before = [array.copy() for array in arrays]
    inputs, memory = plan._with_states(arrays)
    outputs = plan.compute(inputs, memory)
    assert all(np.shares_memory(outputs[output], inputs[given]) for output, given in plan.plan.extended)
    for found, wanted in zip(outputs, plan(*(array.copy() for array in arrays)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert plan.stopwatch(arrays)() > 0
    assert len(plan.time(arrays, 2).run_ns) == 2
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))  # those of the caller stay


def test_masked_rows_are_left_out(executable, reference) -> None:
    given = feeds(executable, 6, 1)
    given["attention_mask"][0, 1:4] = 0
    for found, wanted in zip(executable.run(None, given), reference.run(None, given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_session_keeps_its_rows(executable, reference) -> None:
    session, ids = executable.session(), tokens(30)
    found = [session.run(input_ids=ids[:, :9])[0]]
    found += [session.run(input_ids=ids[:, i : i + 1])[0] for i in range(9, 12)]
    found.append(session.run(input_ids=ids[:, 12:])[0])
    given = feeds(executable, 0, 30) | {"input_ids": ids}
    *presents, logits = reference.run(None, given)
    np.testing.assert_allclose(np.concatenate(found, 1), logits, rtol=1e-3, atol=1e-4)
    assert session.length == 30
    for state, present in zip(session.states(), presents, strict=True):
        np.testing.assert_allclose(state, present, rtol=1e-3, atol=1e-4)


def test_recurrent_operators_whose_loops_are_refused_are_kept_whole(cache_folder, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1, 4] x, float[p, 1, 4] past) => (float[n, 1, 3] y, float[total, 1, 4] present)
        {
            present = Concat <axis = 0> (past, x)
            all, h, c = LSTM <hidden_size = 3> (present, m, r)
            own, k, d = LSTM <hidden_size = 3> (x, m, r)
            flat = Squeeze(own, one)
            y = Add(flat, h)
        }
    """)
    weights = {"m": (1, 12, 4), "r": (1, 12, 3)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    for name, array in {**arrays, "one": np.array([1])}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    monkeypatch.delitem(free.RULES, "loop")
    executable = korch.optimize(model, shapes={"p": range(24), "n": range(1, 12)}, cache_folder=cache_folder, **QUICK)
    assert all(any("opaque" in step.primitives for step in e.plan.steps) for e in executable.executables)
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    session, past = executable.session(), np.zeros((0, 1, 4), np.float32)
    for rows in (9, 1, 1, 8):
        x = rng.standard_normal((rows, 1, 4)).astype(np.float32)
        wanted, past = reference.run(None, {"x": x, "past": past})
        np.testing.assert_allclose(session.run(x=x)[0], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(session.states()[0], past)


@pytest.mark.parametrize("seq", [1, "seq"])
def test_positions_are_optional_if_the_number_of_rows_is_fixed(short, cache_folder, seq) -> None:
    model, ids = build_decoder("tiny-one-layer", seq=seq, batch=1), tokens(8)
    sizes = {"past": range(1, CAPACITY), **({"seq": 1} if seq == "seq" else {})}
    fixed = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert not any(ROWS in tensor.axes for tensor in fixed.described.inputs)
    nothing = {f"past_key_values.0.{kind}": np.zeros((1, 2, 0, 32), np.float32) for kind in ("key", "value")}
    given = {"input_ids": ids, "attention_mask": np.ones((1, 8), np.int64), "position_ids": np.arange(8)[None]}
    *states, wanted = short[1].run(None, given | nothing)
    one, other = fixed.session(), fixed.session()
    for session in (one, other):
        session.assign([state[:, :, :5] for state in states], 5)
    for i in range(5, 8):
        token = ids[:, i : i + 1]
        (found,) = one.run(input_ids=token)
        np.testing.assert_array_equal(found, other.run(input_ids=token, position_ids=np.array([[i]]))[0])
        np.testing.assert_allclose(found, wanted[:, i : i + 1], rtol=1e-3, atol=1e-4)
    (found,), (wrong,) = one.run(input_ids=token), other.run(input_ids=token, position_ids=np.array([[0]]))
    assert np.abs(found - wrong).max() > 1e-2  # positions matter
    with pytest.raises(InputError, match="input 'input_ids': it is missing"):
        one.run(position_ids=np.array([[9]]))


def run_all(session: Session, ids: np.ndarray) -> np.ndarray:
    """Return the last logits of tokens that are run one after another."""
    return [session.run(input_ids=ids[:, i : i + 1])[0] for i in range(ids.shape[1])][-1]


def test_a_benchmark_repeats_a_step_of_a_session(executable, reference, tmp_path, monkeypatch) -> None:
    path, given = tmp_path / "decoder.korch", feeds(executable, 7, 1)
    executable.save(path)
    step = ArtifactPeer().prepare(path, given, 1)
    monkeypatch.setattr(Session, "assign", lambda *args: pytest.fail("a step copies no states"))
    for _ in range(2):
        for found, wanted in zip(step(), reference.run(None, given), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_bench_times_a_step_and_knows_the_model(tmp_path, sums, capsys) -> None:
    path = str(tmp_path / "sums.korch")
    sums.save(path)
    flags = ["--against", "onnxruntime", "--rounds", "1", "--shape", "past=5", "--shape", "rows=8"]
    assert main(["bench", path, *flags]) == 0
    assert "8 new rows after 5 in a session" in capsys.readouterr().out


def test_truncated_and_forked_sessions_are_those_of_a_fresh_run(executable) -> None:
    ids, more = tokens(12), tokens(4, seed=1)
    first, second = executable.session(), executable.session()
    run_all(first, ids)
    run_all(second, ids[:, :7])
    first.truncate(7)
    np.testing.assert_array_equal(run_all(first, more), run_all(second, more))
    branch = first.fork()
    one, other = run_all(first, more), run_all(branch, ids)
    again = executable.session()
    run_all(again, ids[:, :7])
    run_all(again, more)
    np.testing.assert_array_equal(run_all(again.fork(), more), one)
    np.testing.assert_array_equal(run_all(again, ids), other)


def test_a_fork_shares_memory_until_one_of_them_changes(executable) -> None:
    session = executable.session()
    run_all(session, tokens(3))
    branch = copy.copy(session)
    assert branch._memory is session._memory
    run_all(branch, tokens(1))
    assert branch._memory is not session._memory
    owner = session._memory
    run_all(session, tokens(1))
    assert session._memory is owner  # the other one has copied it


def test_a_fork_whose_rows_can_not_be_copied_changes_nothing(executable, monkeypatch) -> None:
    session = executable.session()
    run_all(session, tokens(3))
    branch, before = session.fork(), session.states()
    with monkeypatch.context() as patched:
        patched.setattr(StatefulModel, "memory", raises)
        with pytest.raises(MemoryError):
            branch.run(input_ids=tokens(1))
    run_all(session, tokens(2))
    assert all(map(np.array_equal, branch.states(), before))
    run_all(branch, tokens(2))
    assert all(map(np.array_equal, branch.states(), session.states()))


def raises(*args: object) -> object:
    raise MemoryError


def test_an_artifact_has_the_same_sessions(executable, tmp_path) -> None:
    path = tmp_path / "decoder.korch"
    executable.save(path)
    ids = tokens(10)
    wanted = executable.session().run(input_ids=ids)[0]
    for found in (korch.load(path), pickle.loads(pickle.dumps(executable))):
        assert isinstance(found, StatefulExecutable)
        np.testing.assert_array_equal(found.session().run(input_ids=ids)[0], wanted)
        assert found.described == executable.described


def c_session(executable: StatefulExecutable, folder: Path) -> InC:
    folder.mkdir(exist_ok=True)
    executable.save(folder / "model.korch")
    unpack(folder / "model.korch", folder / "folder")
    return InC(folder / "folder", len(executable.plain_outputs))


def assert_equal_rows(executable: StatefulExecutable, sessions: tuple[InC, Session], rows: int) -> None:
    """Run the same new rows in C and in Python."""
    in_c, session = sessions
    given = feeds(executable, session.length, rows)
    plain = [given[t.name] for i, t in enumerate(executable.described.inputs) if i not in executable.state_inputs]
    for one, other in zip(in_c.run(plain), session.run(*plain), strict=True):
        np.testing.assert_array_equal(one, other)
    assert in_c.length == session.length


def test_a_session_in_c_is_that_of_python(executable, tmp_path) -> None:
    in_c, session = c_session(executable, tmp_path), executable.session()
    both = in_c, session
    for rows in (5, 1, 1, 8, 1, 11):  # a plan for first rows, and parts of 8 and 1
        assert_equal_rows(executable, both, rows)
    assert not in_c.truncate(28) and not in_c.truncate(-1)
    assert in_c.truncate(9)
    session.truncate(9)
    forks = in_c.fork(), session.fork()
    for pair in (forks, both, forks):
        assert_equal_rows(executable, pair, 3)
    assert forks[0].truncate(0)
    forks[1].truncate(0)
    assert_equal_rows(executable, forks, 27)  # more than the plan for first rows takes
    forks[0].stop()
    in_c.close()


def test_a_session_in_c_refuses_rows_before_it_writes_any(cache_folder, tmp_path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2, n] x, float[2, p] past) => (float[2, n] y, float[2, total] present) {
        scaled = Mul(x, x)
        present = Concat <axis = 1> (past, scaled)
        y = Relu(scaled)
    }"""
    sizes = {"p": range(16), "n": range(1, 10)}
    executable = korch.optimize(onnx.parser.parse_model(text), shapes=sizes, cache_folder=cache_folder, **QUICK)
    in_c, session = c_session(executable, tmp_path), executable.session()
    assert_equal_rows(executable, (in_c, session), 12)  # rows are columns here: parts are not contiguous
    with pytest.raises(ValueError, match=r"^5 rows after 12 exceed the capacity of 16$"):
        in_c.run([np.ones((2, 5), np.float32)])
    with pytest.raises(ValueError, match=r"^input x, axis 1: its size is 17; expected 1 to 16 in steps of 1$"):
        in_c.run([np.ones((2, 17), np.float32)])
    assert_equal_rows(executable, (in_c, session), 3)
    x = np.ones((2, 1), np.float32)
    in_c.run([x])
    with pytest.raises(AssertionError):  # another row without korch_fit
        in_c.serve([x], [x.copy()])
    assert in_c.length == 16
    in_c.close()


def test_a_run_that_fails_leaves_zeros_behind_the_rows(cache_folder, tmp_path) -> None:
    text = """(float[n, 4] x, int64[1] k, float[p, 4] past) => (float[1, 4] y, float[total, 4] present) {
        scaled = Mul(x, x)
        present = Concat <axis = 0> (past, scaled)
        sum = ReduceSum <keepdims = 1> (present, axes)
        twice = Add(sum, sum)
        index = Add(k, k)
        row = Gather(table, index)
        y = Add(twice, row)
    }"""
    model = parsed(text, axes=np.array([0]), table=np.zeros((3, 4), np.float32))
    sizes = {"p": range(40), "n": range(1, 17)}
    executable = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(executable, StatefulExecutable)
    in_c = c_session(executable, tmp_path)
    x, k = np.ones((8, 4), np.float32), np.zeros(1, np.int64)
    in_c.run([x, k])
    with pytest.raises(AssertionError):
        in_c.run([x, k + 2])  # the table has 3 rows
    assert in_c.length == 8
    kept = in_c.memory(0, 4 * 4 * 40)
    assert kept == x.tobytes().ljust(len(kept), b"\0")
    np.testing.assert_array_equal(in_c.run([x[:1], k])[0], np.full((1, 4), 18, np.float32))
    in_c.close()
    session = executable.session()
    for length in (0, 8):
        with pytest.raises(ProviderError):
            session.run(x, k + 2)
        assert session.length == length
        assert not any(array[length:].any() for array in session._memory.arrays)
        session.run(x, k)


def test_first_rows_in_c_are_at_least_those_of_the_plan(cache_folder, tmp_path) -> None:
    text = """(float[n, 4] x, float[p, 4] past) => (float[n, 4] y, float[total, 4] present) {
        scaled = Mul(x, x)
        present = Concat <axis = 0> (past, scaled)
        y = Relu(scaled)
    }"""
    sizes = {"p": range(40), "n": range(4, 17)}
    executable = korch.optimize(parsed(text), shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(executable, StatefulExecutable)
    assert list(executable.by_rows) == [8, 0]
    for first in (4, 7, 16):
        in_c, session = c_session(executable, tmp_path / str(first)), executable.session()
        assert_equal_rows(executable, (in_c, session), first)
        assert_equal_rows(executable, (in_c, session), 8)
        in_c.close()
    in_c = c_session(executable, tmp_path / "refused")
    for rows in (3, 17, 20):
        session = executable.session()
        with pytest.raises(InputError, match=f"no plan runs {rows} rows after 0"):
            session.run(np.ones((rows, 4), np.float32))
        assert session.length == 0
        with pytest.raises(
            ValueError, match=rf"^(no plan runs {rows} rows after 0|input x, axis 0: its size is {rows};)"
        ):
            in_c.run([np.ones((rows, 4), np.float32)])
        assert in_c.length == 0
    in_c.close()


def test_what_only_python_gives_or_takes_is_refused(executable) -> None:
    known, plans = executable.described, [one.plan for one in executable.executables]
    ids, logits = replace(known.inputs[0], axes=(ROWS, TOTAL)), replace(known.outputs[-1], axes=("1", TOTAL))
    for changed, message in (
        (replace(known, inputs=(ids, *known.inputs[1:])), "input 'input_ids' has rows and total rows; expected new"),
        (replace(known, outputs=(*known.outputs[:-1], logits)), "output 'logits' has total rows; expected new rows"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            sizes_of_states(plans, States(changed, executable.steps))
    with pytest.raises(UnsupportedError, match="no plan runs first rows, and programs in C can't assign them"):
        sizes_of_states(plans, States(known, tuple(own for own in executable.steps if own.rows)))


def test_plans_that_return_states_in_another_type_are_refused_in_c(executable) -> None:
    plans, changed = [one.plan for one in executable.executables], replace(executable.described, kept="bf16")
    with pytest.raises(ArtifactError, match="a plan returns a state in another type than sessions keep it in"):
        sizes_of_states(plans, States(changed, executable.steps))


def test_the_c_program_of_the_documentation_finds_the_tokens(executable, tmp_path) -> None:
    c_session(executable, tmp_path).close()
    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text("utf-8")
    (text,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    program = program_of(text, tmp_path, "-Lfolder", "-lkorch_runtime", "-Wl,-rpath,$ORIGIN/folder")
    prompt = tokens(30)[0].tolist()
    command = [program, tmp_path / "folder", "18", *map(str, prompt)]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert tuple(map(int, done.stdout.split())) == generate(executable, prompt, 18).tokens
    command[2] = "20"  # more than the capacity
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert done.stderr == "input attention_mask, axis 1: its size is 49; expected 1 to 48 in steps of 1\n"
    assert (len(done.stdout.split()), done.returncode) == (19, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": tokens(49)}, "49 more rows exceed its capacity of 48"),
        ({"input_ids": tokens(3).astype(np.float32)}, "input 'input_ids'"),
        ({"input_ids": tokens(3)[0]}, "it has shape 3"),
        ({"input_ids": tokens(3), "attention_mask": np.ones((1, 4), np.int64)}, "input 'attention_mask'"),
        ({"attention_mask": np.ones((1, 4), np.int64)}, "no input says how many rows are new"),
        ({"ids": tokens(3)}, "there is no input 'ids'"),
        ({"input_ids": np.arange(230, 258)[None]}, "input 'input_ids': it has the index 257; expected -256 to 255"),
        ({"past_key_values.0.key": tokens(3)}, "there is no input 'past_key_values.0.key'"),
    ],
)
def test_bad_input_changes_nothing(executable, given, message) -> None:
    session = executable.session()
    with pytest.raises(InputError, match=message):
        session.run(**given)
    assert session.length == 0


def test_sessions_have_limits(executable) -> None:
    with pytest.raises(InputError, match="the capacity is 49"):
        executable.session(49)
    session = executable.session(4)
    session.run(input_ids=tokens(4))
    with pytest.raises(InputError, match="1 more rows exceed its capacity of 4"):
        session.run(input_ids=tokens(1))
    with pytest.raises(InputError, match="it can't be cut to 5 rows"):
        session.truncate(5)
    with pytest.raises(InputError, match=r"the number of rows is 2\.5; expected a whole number"):
        session.truncate(2.5)  # type: ignore[arg-type]
    zeros = [np.zeros((1, 2, 9, 32), np.float32)] * 4
    before = session.states()
    for arrays, length, message in (
        (zeros, 9, "9 rows can't be assigned; expected 0 to 4, its capacity"),
        (zeros, -1, "-1 rows can't be assigned"),
        (zeros[:2], 4, "2 states are given; expected 4: 'past_key_values.0.key', "),
        ([a[:, :, :3] for a in zeros], 4, "expected f32"),
    ):
        with pytest.raises(InputError, match=message):
            session.assign(arrays, length)
    assert all(map(np.array_equal, session.states(), before))


@pytest.mark.parametrize(("build", "pasts"), [(later, range(16)), (placed, range(110))])
def test_rows_that_depend_on_later_ones_are_not_run_in_parts(cache_folder, sums, build, pasts) -> None:
    sizes = {"p": pasts, "n": range(1, 10)}
    found = sums if build is later else korch.optimize(build(), shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    assert not found.described.is_causal
    rng = np.random.default_rng(0)
    session = onnxruntime.InferenceSession(build().SerializeToString())
    for past, rows in ((0, 3), (4, 1), (5, 8), (pasts[-1] - 8, 8)):
        shapes = {tensor.name: tensor.shape(past, rows) for tensor in found.described.inputs}
        given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for one, wanted in zip(found.run(None, given), session.run(None, given), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="no plan runs 3 rows after 4"):
        found(*(np.zeros(tensor.shape(4, 3), np.float32) for tensor in found.described.inputs))


def test_an_input_without_rows_is_given_to_each_part(cache_folder) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4] x, float[p, 4] past, float[4, 4] w) => (float[n, 4] y, float[total, 4] present) {
        scaled = MatMul(x, w)
        present = Concat <axis = 0> (past, scaled)
        y = Relu(scaled)
    }"""
    sizes = {"p": range(16), "n": range(1, 10)}
    found = korch.optimize(onnx.parser.parse_model(text), shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    assert found.described.is_causal
    x, w, session = np.ones((9, 4), np.float32), np.full((4, 4), 0.5, np.float32), found.session()
    for rows in (2, 9):
        np.testing.assert_allclose(session.run(x=x[:rows], w=w)[0], np.full((rows, 4), 2.0))


@pytest.mark.parametrize("past", [range(10), range(3, 16)])
def test_small_capacities_and_states_that_are_never_empty(cache_folder, past) -> None:
    found = korch.optimize(later(), shapes={"p": past, "n": range(1, 9)}, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    assert not found.described.is_causal  # whether parts are right is looked at, not assumed
    x, before = np.ones((4, 1), np.float32), np.ones((4, 5), np.float32)
    np.testing.assert_allclose(found(x, before)[0], np.full((4, 1), 7.0))


def test_fewer_rows_than_the_plans_have_are_refused(cache_folder) -> None:
    text = """(float[n, 4] x, float[p, 4] past) => (float[1, 4] y, float[total, 4] present) {
        present = Concat <axis = 0> (past, x)
        part = Slice(present, begin, end)
        y = ReduceMax <axes = [0], keepdims = 1> (part)
    }"""
    model, sizes = parsed(text, begin=np.array([0]), end=np.array([16])), {"p": range(16, 33), "n": range(1, 9)}
    executable = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(executable, StatefulExecutable)
    session, x = executable.session(), np.full((1, 4), -1, np.float32)
    for past in (0, 5, 15):
        session.assign([np.full((past, 4), -1, np.float32)], past)
        with pytest.raises(InputError, match=f"no plan runs 1 rows after {past}; expected .* behind 16 or more others"):
            session.run(x)
        assert session.length == past
    session.assign([np.full((16, 4), -1, np.float32)], 16)
    np.testing.assert_array_equal(session.run(x)[0], x)


def test_a_model_whose_sizes_are_known_is_not_searched_for_states(monkeypatch, cache_folder) -> None:
    monkeypatch.setattr("korch.api.state_sizes", lambda model, binding: pytest.fail("it has no free dimension"))
    found = korch.optimize(later(), shapes={"x": (4, 2), "past": (4, 3)}, cache_folder=cache_folder, **QUICK)
    assert not isinstance(found, StatefulExecutable)


@pytest.mark.parametrize("sizes", [{"past": 4, "rows": 2}, {"past": 4, "seq": 2}, {"past": 4}, {"past": 4, "batch": 2}])
def test_one_number_of_rows_gives_a_plan_for_it(model, cache_folder, sizes) -> None:
    found = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, Executable)
    rows, batch = 2 if len(sizes) == 2 and "batch" not in sizes else 1, sizes.get("batch", 1)
    ids, mask, _, past = found.get_inputs()[:4]
    assert (ids.shape, mask.shape, past.shape) == ([batch, rows], [batch, 4 + rows], [batch, 2, 4, 32])


def test_a_table_of_places_limits_the_rows() -> None:
    model = read_model(placed())
    sizes = state_sizes(model, {"n": (range(1, 9),)})
    assert (sizes.past, sizes.assumed) == (range(120), (PAST,))
    assert "--shape past=0..119 (the model takes no more earlier rows)" in sizes.text
    assert state_sizes(model, {"p": (range(120),)}).past == range(120)
    message = r"at most 120 rows \(model: node 'row' \(Gather\): its constant index 120.*expected at most past=0\.\.119"
    with pytest.raises(OptionError, match=message):
        state_sizes(model, {"p": (range(121),)})
    with pytest.raises(OptionError, match="no dimension of the model counts new rows: it takes 1; expected the name"):
        state_sizes(model, {"rows": (range(1, 9),)})  # "n" is taken for a batch


def test_new_rows_may_be_one_number(cache_folder, tmp_path) -> None:
    sizes = {"past": range(16), "rows": 1}
    found = korch.optimize(later(), shapes=sizes, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, StatefulExecutable)
    assert list(found.by_rows) == [1]
    found.save(tmp_path / "model.korch")
    with pytest.raises(UnsupportedError, match="no plan runs first rows"):
        unpack(tmp_path / "model.korch", tmp_path / "folder")
    with pytest.raises(OptionError, match="the new rows are a range, and the earlier ones are not"):
        korch.optimize(later(), shapes={"past": 4, "rows": range(1, 4)}, cache_folder=cache_folder, **QUICK)


def test_inputs_of_a_user_are_compared(cache_folder, tmp_path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "inputs.npz"
    sizes = {"p": range(16), "n": range(1, 10)}
    np.savez(path, x=rng.standard_normal((4, 8)), past=rng.standard_normal((4, 3)))
    found = korch.optimize(later(), shapes=sizes, cache_folder=cache_folder, inputs=path, **QUICK)
    assert isinstance(found, StatefulExecutable)
    np.savez(path, x=rng.standard_normal((4, 7)), past=rng.standard_normal((4, 3)))
    with pytest.raises(InputError, match="no plan runs 7 rows after 3"):
        korch.optimize(later(), shapes=sizes, cache_folder=cache_folder, inputs=path, **QUICK)


def test_commands_take_artifacts_with_states(executable, tmp_path, capsys) -> None:
    path = str(tmp_path / "decoder.korch")
    executable.save(path)
    for command in (
        ["run", path, "--random"],
        ["run", path, "--random", "--shape", "past=5", "--shape", "rows=1"],
        ["explain", path],
        ["explain", path, "--kernel", "1", "--shape", "past=5", "--shape", "rows=1"],
        ["profile", path, "--shape", "past=5", "--shape", "rows=8"],
    ):
        assert main(command) == 0, capsys.readouterr().err
    assert "steps of 1 row" in capsys.readouterr().out


def test_damaged_states_are_refused(executable, tmp_path) -> None:
    path = Path(tmp_path / "decoder.korch")
    executable.save(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"rows": 8', b'"rows": 9'))
    with pytest.raises(ArtifactError):
        korch.load(path)


def greedy(executable: StatefulExecutable, reference: onnxruntime.InferenceSession, prompt: list[int], count: int):
    """Return the likeliest tokens after a prompt, one after another."""
    found: list[int] = []
    for _ in range(count):
        given = feeds(executable, 0, len(prompt) + len(found)) | {"input_ids": np.array([prompt + found])}
        found.append(int(reference.run(["logits"], given)[0][0, -1].argmax()))
    return found


def test_tokens_are_those_of_the_model(executable, reference, tmp_path, capsys) -> None:
    prompt = tokens(6)[0].tolist()
    wanted = greedy(executable, reference, prompt, 9)
    told: list[int] = []
    assert generate(executable, prompt, 9, tell=told.append).tokens == tuple(told) == tuple(wanted)
    assert generate(executable, prompt, 9, stop=wanted[3:4]).tokens == tuple(wanted[: 1 + wanted.index(wanted[3])])
    drawn = [generate(executable, prompt, 9, Sampling(1.0, 5, seed)).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate(executable, prompt, 9, Sampling(1.0, 1)).tokens == tuple(wanted)
    path = str(tmp_path / "decoder.korch")
    executable.save(path)
    assert main(["generate", path, "--ids", ",".join(map(str, prompt)), "--count", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == [str(token) for token in wanted]
    assert "prompt: 6 tokens" in printed.err and "new: 9" in printed.err


def test_a_model_may_choose_the_tokens(cache_folder) -> None:
    text = """(int64[1, n] input_ids, float[1, p, 8] past) => (int64[1, n] tokens, float[1, total, 8] present) {
        rows = Gather <axis = 0> (table, input_ids)
        present = Concat <axis = 1> (past, rows)
        sum = ReduceSum <keepdims = 1> (present, axes)
        both = Add(rows, sum)
        logits = MatMul(both, weights)
        tokens = ArgMax <axis = -1, keepdims = 0> (logits)
    }"""
    rng = np.random.default_rng(0)
    table, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 8), (8, 64)))
    model = parsed(text, table=table, weights=weights, axes=np.array([1]))
    ending = korch.optimize(model, shapes={"p": range(16), "n": range(1, 9)}, cache_folder=cache_folder, **QUICK)
    assert isinstance(ending, StatefulExecutable)
    model.graph.output.append(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, (1, "n", 64)))
    reference, prompt = onnxruntime.InferenceSession(model.SerializeToString()), (tokens(6)[0] % 64).tolist()
    wanted = greedy(ending, reference, prompt, 9)
    assert generate(ending, prompt, 9).tokens == tuple(wanted) and len(set(wanted)) > 2
    with pytest.raises(InputError, match="the model returns tokens, not logits; expected a temperature of 0"):
        generate(ending, prompt, 1, Sampling(1.0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ids", "1,x"], "'1,x' is no list of token ids"),
        (["--ids", ""], "the prompt has no tokens"),
        (["--ids", "1", "--count", "0"], "the value 0 is too small"),
        (["--ids", "1", "--temperature", "-1"], "the temperature is -1.0"),
        (["--ids", "1", "--top-k", "-1"], "it is negative"),
        (["--ids", "1", "--count", "99"], "1 more rows exceed its capacity of 48"),
    ],
)
def test_bad_flags_of_generate_are_refused(executable, tmp_path, capsys, flags, message) -> None:
    path = str(tmp_path / "decoder.korch")
    executable.save(path)
    assert main(["generate", path, *flags]) == 1
    assert message in capsys.readouterr().err
