"""Sessions of models whose caches are written by an operator of attention, or by a scatter beside it."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from korch.cli import main
from korch.errors import InputError, OptionError, UnsupportedError
from korch.fission import fission
from korch.frontend.onnx import read_model
from korch.pipeline.stateful import _Model, state_sizes
from korch.primitive import reference
from korch.ranges.masked import masked
from korch.runtime.stateful import StatefulExecutable
from tests.runtime.cached_models import HEADS, SIZE, WORDS, Form

QUICK = {
    "measure": False,
    "threads": 1,
    "ablation": korch.Ablation(baselines=False, rules="none"),
    "search": korch.SearchLimits(max_primitives=8, max_candidates=2000),
}
CAPACITY, ROWS = 40, 12
CAUSAL = {"is_causal": 1}
G = "GroupQueryAttention"
SINKS = np.linspace(-1, 1, HEADS).astype(np.float32)
FORMS: dict[str, Form] = {
    "attention": Form("Attention", 25, attributes={**CAUSAL, "left_window_size": 5, "softcap": 2.0}),
    "scatter": Form("TensorScatter", past=CAPACITY, batch=2, attributes={**CAUSAL, "mode": "circular"}),
    "scatter positions": Form("TensorScatter", past=CAPACITY, counts="positions", attributes=CAUSAL),
    "grouped": Form(G, 17, has_rotary=True, is_packed=True, attributes={"local_window_size": 6, "softcap": 3.0}),
    "grouped capacity": Form(G, 17, past="capacity", has_rotary=True),
    "grouped mask": Form(G, 17, batch=2, counts="mask", inputs={11: SINKS}, has_norms=True),
    "many heads": Form("MultiHeadAttention", 17, attributes={"unidirectional": 1}),
    "masked heads": Form("DecoderMaskedMultiHeadAttention", 17, past=CAPACITY, rows=1),
}


def fed(model: onnx.ModelProto, past: int, ids: np.ndarray, caches: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all inputs of a model for new rows behind some others."""
    counts = {"seqlens_k": past + ids.shape[1] - 1, "write_indices": past, "past_sequence_length": past}
    counts |= {"nonpad": past + ids.shape[1], "total_sequence_length": past + ids.shape[1]}
    found = {"ids": ids}
    for item in model.graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
        if item.name in counts:
            shape = [dim.dim_value for dim in item.type.tensor_type.shape.dim]
            found[item.name] = np.full(shape, counts[item.name], dtype)
        elif item.name == "attention_mask":
            found[item.name] = np.ones((len(ids), past + ids.shape[1]), np.int64)
        elif item.name == "position_ids":
            found[item.name] = np.arange(past, past + ids.shape[1])[None]
        elif item.name in caches:
            found[item.name] = caches[item.name]
    return found


def expected(form: Form, model: onnx.ModelProto, ids: np.ndarray) -> list[np.ndarray]:
    """Return the outputs of ONNX Runtime for all rows at once."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    held = CAPACITY if form.past == form.present else 0
    names = [item.name for item in model.graph.input if item.name.startswith("past.")]
    caches = {name: np.zeros((len(ids), form.groups, held, SIZE), np.float32) for name in names}
    found = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, fed(model, 0, ids, caches))
    return [found[-1], *(array[:, :, : ids.shape[1]] for array in found[:-1])]


def tokens(form: Form, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, (form.batch, count))


@pytest.fixture(scope="module")
def built(cache_folder):
    """Return a function that optimizes a form once."""
    known: dict[str, tuple[onnx.ModelProto, StatefulExecutable]] = {}

    def build(name: str) -> tuple[onnx.ModelProto, StatefulExecutable]:
        if name not in known:
            model = FORMS[name].build()
            sizes = {"past": range(CAPACITY - 1)} | ({"rows": range(1, ROWS + 1)} if FORMS[name].rows == "rows" else {})
            found = korch.optimize(model, shapes=sizes, cache_folder=cache_folder, **QUICK)
            assert isinstance(found, StatefulExecutable)
            known[name] = model, found
        return known[name]

    return build


@pytest.mark.parametrize("name", [name for name in FORMS if name != "masked heads"])
def test_a_step_is_the_same_for_each_number_of_rows(name) -> None:
    form, model = FORMS[name], FORMS[name].build()
    sizes = state_sizes(read_model(model), {"past": (range(CAPACITY - 1),), "rows": (range(1, ROWS + 1),)})
    ids, caches = tokens(form, 14), []
    wanted = expected(form, model, ids)
    for past, rows in ((0, 5), (5, 1), (6, 8)):
        graph = fission(sizes.load(rows, past))
        inputs = [name for name, _ in graph.inputs if name != "ids"]
        empty = [np.zeros((form.batch, form.groups, 0, SIZE), np.float32)] * len(inputs)
        given = {"ids": ids[:, past : past + rows], **dict(zip(inputs, caches or empty, strict=True))}
        *caches, logits = reference.run(graph, given).values()
        np.testing.assert_allclose(logits, wanted[0][:, past : past + rows], rtol=1e-3, atol=1e-4)
    for cache, other in zip(caches, wanted[1:], strict=True):
        np.testing.assert_allclose(cache, other, rtol=1e-3, atol=1e-4)
    known = _Model.of(sizes)
    for source in (known.step(1), known.step(8), known.first()):
        masked(source.dimensions, tuple(d.high for d in source.dimensions), source.primitives)


@pytest.mark.parametrize("name", ["scatter", "grouped"])
def test_a_session_computes_what_the_model_does(built, name) -> None:
    model, executable = built(name)
    form, session = FORMS[name], executable.session()
    ids = tokens(form, 25)
    parts = [session.run(ids=ids[:, begin:end])[0] for begin, end in ((0, 5), (5, 6), (6, 7), (7, 25))]
    logits, *caches = expected(form, model, ids)
    np.testing.assert_allclose(np.concatenate(parts, 1), logits, rtol=1e-3, atol=1e-4)
    for state, cache in zip(session.states(), caches, strict=True):
        np.testing.assert_allclose(state, cache, rtol=1e-3, atol=1e-4)
    branch = session.fork()
    session.truncate(6)
    np.testing.assert_allclose(session.run(ids=ids[:, 6:8])[0], logits[:, 6:8], rtol=1e-3, atol=1e-4)
    again, more = executable.session(), tokens(form, 1, 1)
    again.assign(branch.states(), 25)
    np.testing.assert_array_equal(again.run(ids=more)[0], branch.run(ids=more)[0])


def test_steps_of_one_row_follow_rows_that_are_assigned(built) -> None:
    model, executable = built("masked heads")
    form, session, rng = FORMS["masked heads"], executable.session(), np.random.default_rng(0)
    caches = [rng.standard_normal((1, HEADS, 7, SIZE)).astype(np.float32) for _ in executable.described.states]
    with pytest.raises(InputError, match="no plan runs 1 rows after 0; expected 1 rows behind 1 or more others"):
        session.run(ids=tokens(form, 1))
    session.assign(caches, 7)
    names = [item.name for item in model.graph.input if item.name.startswith("past.")]
    whole = [np.concatenate([cache, np.zeros((1, HEADS, CAPACITY - 7, SIZE), np.float32)], 2) for cache in caches]
    given = fed(model, 7, tokens(form, 1), dict(zip(names, whole, strict=True)))
    *wanted, logits = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    found = session.run(ids=given["ids"], past_sequence_length=given["past_sequence_length"])
    np.testing.assert_allclose(found[0], logits, rtol=1e-3, atol=1e-4)
    for state, cache in zip(session.states(), wanted, strict=True):
        np.testing.assert_allclose(state, cache[:, :, :8], rtol=1e-3, atol=1e-4)


def test_counts_may_be_given_and_are_compared(built) -> None:
    model, executable = built("grouped")
    ids, session = tokens(FORMS["grouped"], 3), executable.session()
    counts = {"seqlens_k": np.array([2], np.int32), "total_sequence_length": np.array(3, np.int32)}
    (wanted,) = executable.session().run(ids=ids)
    np.testing.assert_array_equal(session.run(ids=ids, **counts)[0], wanted)
    with pytest.raises(InputError, match=r"input 'seqlens_k': it has .2.; expected .5., since 3 rows follow 3"):
        session.run(ids=ids, **counts)
    assert session.length == 3
    named = dict(zip((f"past.0.{kind}" for kind in ("key", "value")), session.states(), strict=True))
    given = fed(model, 3, ids, named)
    (branch,) = session.fork().run(ids=ids)
    np.testing.assert_array_equal(executable.run(["logits"], given)[0], branch)
    with pytest.raises(InputError, match=r"input 'total_sequence_length': it has .3.; expected .6."):
        executable.run(None, given | counts | {"seqlens_k": given["seqlens_k"]})


def test_a_benchmark_gives_other_engines_the_counts(built, tmp_path) -> None:
    model, executable = built("grouped")
    paths = [str(tmp_path / name) for name in ("decoder.korch", "decoder.onnx")]
    executable.save(paths[0])
    onnx.save(model, paths[1])
    assert main(["bench", paths[0], "--model", paths[1], "--against", "onnxruntime", "--rounds", "2"]) == 0


def scattered(change: str) -> onnx.ModelProto:
    """Return a model with a cache of a fixed capacity that is read or written in another way."""
    model = FORMS["scatter"].build()
    nodes = {node.op_type: node for node in model.graph.node}
    scatter, attention = nodes["TensorScatter"], nodes["Attention"]
    if change == "whole":
        attention.input[6] = ""
    elif change == "begin":
        del scatter.input[2]
    elif change == "place":
        first = onnx.helper.make_node("Add", ["write_indices", "write_indices"], ["twice"])
        model.graph.node.insert(0, first)
        scatter.input[2] = "twice"
    elif change == "alias":
        model.graph.node.insert(2, onnx.helper.make_node("Identity", [scatter.output[0]], ["alias"]))
        order = [*model.graph.node]
        order.insert(order.index(attention), order.pop(2))
        del model.graph.node[:]
        model.graph.node.extend(order)
        attention = next(node for node in model.graph.node if node.op_type == "Attention")
        attention.input[2], attention.input[6] = "alias", ""
    elif change == "other":
        model.graph.node.append(onnx.helper.make_node("ReduceMax", [attention.input[1]], ["best"], keepdims=0))
        model.graph.output.append(onnx.helper.make_tensor_value_info("best", 1, ()))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("whole", r"node 'Attention_\d+' .Attention.: it reads all rows of the cache 'past.0.(key|value)'"),
        (
            "begin",
            r"node 'TensorScatter_\d+' .TensorScatter.: it writes the first rows of the cache 'past.0.(key|value)'",
        ),
        ("place", r"node 'TensorScatter_\d+' .TensorScatter.: its number of rows 'twice' is \d+ with 11 \+ 3 rows"),
        ("other", r"node 'best' .ReduceMax.: it reads all rows of the cache 'past.0.(key|value)'"),
    ],
)
def test_caches_that_are_no_states_are_refused(change, message) -> None:
    with pytest.raises(UnsupportedError, match=message):
        korch.optimize(scattered(change), shapes={"past": range(8), "rows": range(1, 4)}, **QUICK)


def test_a_session_has_no_more_rows_than_the_cache() -> None:
    sizes = state_sizes(read_model(FORMS["scatter"].build()), {})
    assert (sizes.past, sizes.assumed) == (range(CAPACITY), ("past", "rows"))
    with pytest.raises(OptionError, match=r"the model's cache has 40 rows; expected at most past=0\.\.39"):
        state_sizes(read_model(FORMS["scatter"].build()), {"past": (range(41),)})
