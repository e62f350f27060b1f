import numpy as np
import pytest

from benchmarks.decode import READ, Step, _sum
from benchmarks.models.decoder import DECODERS, build_decoder
from benchmarks.models.writer import save
from korch.api import optimize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_inputs_of_a_step_are_those_of_its_model(dtype):
    step = Step("tiny-qwen3", dtype, 5)
    model = build_decoder(step.name, dtype, batch=1, seq=1, past=5)
    declared = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert {name: list(array.shape) for name, array in step.inputs().items()} == declared


def test_embeddings_are_read_once_if_the_last_product_has_them(tmp_path):
    at = DECODERS["tiny-qwen3"]
    cache = 2 * at.layers * at.groups * 5 * at.head * 4
    step = Step("tiny-qwen3", "float32", 5)
    model = build_decoder(step.name, "float32", batch=1, seq=1, past=5)
    weights = step.saved(tmp_path / "a.onnx", seq=1, past=5)
    assert step.bytes_read(weights) == sum(len(t.raw_data) for t in model.graph.initializer) + cache
    assert step.saved(tmp_path / "a.onnx", seq=1, past=5) == weights  # of the file that is there
    step = Step("tiny", "float32", 5)
    model = build_decoder("tiny", "float32", batch=1, seq=1, past=5)
    all_bytes = sum(len(t.raw_data) for t in model.graph.initializer)
    assert all_bytes - 256 * 64 * 4 == step.saved(tmp_path / "b.onnx", seq=1, past=5)


def test_reads_add_up_numbers_of_their_own(tmp_path):
    save(_sum(2), tmp_path / "sum.onnx")
    optimize(tmp_path / "sum.onnx", cache_folder=tmp_path, measure=False, progress=False).save(
        tmp_path / "read-2.korch"
    )
    (found,) = READ.prepare(tmp_path / "read-2.korch", {}, 2)()
    np.testing.assert_array_equal(found, np.full((2, 1), 1 << 16))
