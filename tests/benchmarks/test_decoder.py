import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.models.decoder import DECODERS, DTYPES, build_decoder, quantized
from benchmarks.models.writer import save
from benchmarks.peers.llama import LLAMA, write_gguf
from korch.errors import OptionError

TINY = DECODERS["tiny"]


def _session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(session, tokens, cache, mask=None):
    """Return logits and the present keys and values after some tokens; `cache`: those before them."""
    batch, seq = tokens.shape
    names = [i.name for i in session.get_inputs() if i.name.startswith("past")]
    past = cache[0].shape[2]
    mask = np.ones((batch, past + seq), np.int64) if mask is None else mask
    positions = np.maximum(np.cumsum(mask, 1)[:, past:] - 1, 0)
    feed = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    arrays = session.run(None, feed | dict(zip(names, cache, strict=True)))
    known = dict(zip([o.name for o in session.get_outputs()], arrays, strict=True))
    return known["logits"], [known[n.replace("past_key_values", "present")] for n in names]


def _empty(sizes, batch, dtype=np.float32):
    return [np.zeros((batch, sizes.groups, 0, sizes.head), dtype)] * (2 * sizes.layers)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_prefill_and_steps_give_the_logits_of_one_pass(name, dtype):
    session, sizes = _session(build_decoder(name, dtype)), DECODERS[name]
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (2, 9))
    empty = _empty(sizes, 2, np.float16 if dtype == "float16" else np.float32)
    whole, kept = _run(session, tokens, empty)
    found, cache = _run(session, tokens[:, :6], empty)
    for i in range(6, 9):
        step, cache = _run(session, tokens[:, i : i + 1], cache)
        found = np.concatenate([found, step], 1)
    limit = 3e-2 if dtype == "float16" else 2e-5
    np.testing.assert_allclose(found, whole, rtol=limit, atol=limit)
    for one, other in zip(cache, kept, strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)
    assert whole.std() > 0.3
    assert not np.allclose(whole[:, :1], whole[:, 1:2], atol=0.1)


def test_padding_on_the_left_changes_nothing():
    session = _session(build_decoder("tiny"))
    tokens = np.random.default_rng(1).integers(0, 256, (1, 5))
    alone, _ = _run(session, tokens, _empty(TINY, 1))
    padded = np.concatenate([np.full((1, 3), 7), tokens], 1)
    mask = np.array([[0] * 3 + [1] * 5])
    found, _ = _run(session, padded, _empty(TINY, 1), mask)
    np.testing.assert_allclose(found[:, 3:], alone, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_sizes_are_those_that_were_asked_for(dtype):
    model = build_decoder("tiny", dtype, batch=1, seq=2, past=7, is_last=True)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*model.graph.input, *model.graph.output)
    }
    assert shapes["attention_mask"] == [1, 9]
    assert shapes["past_key_values.1.value"] == [1, 2, 7, 16]
    assert shapes["present.0.key"] == [1, 2, 9, 16]
    assert shapes["logits"] == [1, 1, 256]
    if dtype != "bfloat16":  # ONNX Runtime has no kernels for it
        assert _session(model).get_inputs()[1].shape == [1, 9]


def test_the_logits_of_the_last_token_are_those_of_all():
    tokens = np.random.default_rng(2).integers(0, 256, (1, 5))
    every, last = (_run(_session(build_decoder("tiny", is_last=b)), tokens, _empty(TINY, 1))[0] for b in (False, True))
    np.testing.assert_allclose(last, every[:, -1:], atol=1e-5)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.5 / 127), (4, 0.5 / 7)])
def test_quantized_weights_are_within_half_a_step(bits, limit):
    weights = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)
    numbers, scales = quantized(weights, bits)
    real = (numbers.astype(np.float32) - (1 << (bits - 1))) * scales
    largest = np.abs(weights.reshape(3, 2, 32)).max(-1, keepdims=True)
    assert (np.abs(real.reshape(3, 64) - weights).reshape(3, 2, 32) <= limit * largest * 1.01).all()


def test_a_saved_model_is_read_again(tmp_path):
    model = build_decoder("tiny")
    save(model, tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx") == model


def test_unknown_sizes_and_types_are_refused():
    with pytest.raises(OptionError, match="no decoder with sizes 'huge'"):
        build_decoder("huge")
    with pytest.raises(OptionError, match="no decoder with dtype 'int3'"):
        build_decoder("tiny", "int3")


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 1e-3), ("float16", 2e-3), ("int8", 0.05), ("int4", 0.2), ("int8-rounded", 0.05)]
)
def test_llama_runs_the_same_decoder(name, dtype, limit, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf and llama-cpp-python, which are optional")
    if LLAMA.is_available() is not None:
        pytest.skip("llama-cpp-python is optional")
    sizes, past = DECODERS[name], 20
    write_gguf(tmp_path / "m.gguf", name, dtype)
    prompt = np.random.default_rng(0).integers(0, sizes.vocabulary, past)  # the tokens with which the cache is filled
    tokens = np.array([[7]])
    kind = np.float16 if dtype == "float16" else np.float32
    session = _session(build_decoder(name, dtype))
    whole, _ = _run(session, np.concatenate([prompt[None], tokens], 1), _empty(sizes, 1, kind))
    cache = np.zeros((1, sizes.groups, past, sizes.head), kind)
    inputs = {"input_ids": tokens, "attention_mask": np.ones((1, past + 1)), "past_key_values.0.key": cache}
    run = LLAMA.prepare(tmp_path / "m.gguf", inputs, 2)
    for _ in range(2):
        (found,) = run()
        assert np.abs(found[0, 0] - whole[0, -1]).max() <= limit * np.abs(whole[0, -1]).max()
