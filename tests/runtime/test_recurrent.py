"""Sessions of models whose states keep their shape."""

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from korch.errors import InputError

# A gated unit whose state is `hidden`, and an average over runs; `input` and `output` have the state's type.
CELL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8] input, float[1, 8] hidden_in_0, float[1, 8] prev_mean, int64[1] at)
  => (float[1, 8] output, float[1, 8] new_mean, float[1, 8] hidden_out_0)
<float[3, 8] table = {TABLE}, float[1] half = {0.5}> {
    row = Gather(table, at)
    both = Add(input, hidden_in_0)
    gate = Sigmoid(both)
    new = Tanh(both)
    kept = Mul(gate, hidden_in_0)
    hidden_out_0 = Add(kept, new)
    sum = Add(prev_mean, new)
    new_mean = Mul(sum, half)
    output = Add(new_mean, row)
}""".replace("TABLE", ", ".join(f"{n / 10:.1f}" for n in range(24)))

NAMES = {"prev_mean": "new_mean", "hidden_in_0": "hidden_out_0"}


@pytest.fixture(scope="module")
def executable(cache_folder):
    search = korch.SearchLimits(max_primitives=8, max_candidates=500)
    model = onnx.parser.parse_model(CELL)
    return korch.optimize(model, cache_folder=cache_folder, measure=False, threads=1, search=search)


def steps(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"input": rng.standard_normal((1, 8)).astype(np.float32), "at": np.array([n % 3])} for n in range(count)]


def expected(given, states: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    reference = onnxruntime.InferenceSession(onnx.parser.parse_model(CELL).SerializeToString())
    for own in given:
        output, mean, hidden = reference.run(None, {**own, **states})
        states = {"prev_mean": mean, "hidden_in_0": hidden}
    return output, states


def test_a_session_keeps_states_of_a_fixed_shape(executable, tmp_path) -> None:
    executable.save(tmp_path / "cell.korch")
    zeros, given = {name: np.zeros((1, 8), np.float32) for name in NAMES}, steps(5)
    for own in (executable, korch.load(tmp_path / "cell.korch")):
        session = own.session()
        assert session.pairs == NAMES
        for step in given[:3]:
            (found,) = session.run(**step)
        branch, (output, states) = session.fork(), expected(given[:3], zeros)
        np.testing.assert_allclose(found, output, rtol=1e-5, atol=1e-6)
        (other,) = branch.run(given[3]["input"], given[3]["at"])
        np.testing.assert_allclose(other, expected(given[:4], zeros)[0], rtol=1e-5, atol=1e-6)
        for name, state in session.states().items():
            np.testing.assert_allclose(state, states[name], rtol=1e-5, atol=1e-6)
        session.assign({"prev_mean": np.ones((1, 8), np.float32)})
        wanted, _ = expected(given[4:], {**states, "prev_mean": np.ones((1, 8), np.float32)})
        np.testing.assert_allclose(session.run(**given[4])[0], wanted, rtol=1e-5, atol=1e-6)
        session.reset()
        assert not any(state.any() for state in session.states().values())


def test_errors_change_no_state(executable) -> None:
    session, (step,) = executable.session(), steps(1)
    session.run(**step)
    before = session.states()
    for given, message in (
        ({**step, "at": np.array([3])}, "input 'at': it has the index 3; expected -3 to 2"),
        ({"at": step["at"]}, "input 'input' is missing"),
        ({**step, "prev_mean": step["input"]}, "'prev_mean' is a state; expected no array for it"),
        ({**step, "input": step["input"][0]}, "input 'input'"),
    ):
        with pytest.raises(InputError, match=message):
            session.run(**given)
    for states, message in (
        ({"hidden": step["input"]}, "there is no state 'hidden'; expected 'prev_mean', 'hidden_in_0'|'hidden_in_0', "),
        ({"prev_mean": step["input"][:, :3]}, "input 'prev_mean': it is f32"),
    ):
        with pytest.raises(InputError, match=message):
            session.assign(states)
    assert all(np.array_equal(state, before[name]) for name, state in session.states().items())


def test_states_may_be_given(executable) -> None:
    assert executable.session({"hidden_in_0": "hidden_out_0"}).pairs == {"hidden_in_0": "hidden_out_0"}
    for states, message in (
        ({"h": "new_mean"}, "there is no input 'h'; expected 'input', "),
        ({"prev_mean": "mean"}, "there is no output 'mean'"),
        ({"at": "new_mean"}, r"state 'at': the output 'new_mean' is tensor\(float\)\[1, 8\]; expected tensor\(int64\)"),
        ({"prev_mean": "new_mean", "input": "new_mean"}, "an output is given for two states"),
    ):
        with pytest.raises(InputError, match=message):
            executable.session(states)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("y", "z"), "no output has the name, the shape and the type of an input; expected the output of each state"),
        (("x_out", "new_x"), "'x' is in several pairs of a state; expected the output of each state"),
    ],
)
def test_names_that_leave_it_open_are_refused(cache_folder, names, message) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[4] x) => (float[4] FIRST, float[4] SECOND) { FIRST = Relu(x) SECOND = Abs(x) }"""
    model = onnx.parser.parse_model(text.replace("FIRST", names[0]).replace("SECOND", names[1]))
    found = korch.optimize(model, cache_folder=cache_folder, measure=False, threads=1)
    with pytest.raises(InputError, match=message):
        found.session()


def test_rows_of_a_state_are_written_in_its_memory(cache_folder) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1, 3] x, int64[1, 1] at, float[300, 3] past_key) => (float[3] y, float[300, 3] present_key)
    <int64[1] axes = {0}> {
        present_key = ScatterND(past_key, at, x)
        y = ReduceSum <keepdims = 0> (present_key, axes)
    }"""
    found = korch.optimize(onnx.parser.parse_model(text), cache_folder=cache_folder, measure=False, threads=1)
    session, x = found.session(), np.ones((1, 3), np.float32)
    memory = session._states["past_key"]
    for n in range(3):
        assert session.run(x, np.array([[n]]))[0].tolist() == [n + 1.0] * 3
    assert session._states["past_key"] is memory and memory[:3].all()
    branch = session.fork()
    assert branch.run(x, np.array([[7]]))[0].tolist() == [4.0] * 3
    assert session.run(x, np.array([[2]]))[0].tolist() == [3.0] * 3
    session.assign({"past_key": np.zeros((300, 3), np.float32)})
    assert session.run(x, np.array([[-1]]))[0].tolist() == [1.0] * 3
