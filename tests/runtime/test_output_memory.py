"""Large outputs lie in memory of earlier runs, but never in memory that an array still has."""

import numpy as np
import onnx
import pytest

import korch
from korch.runtime.output_memory import LARGE, OutputMemory


@pytest.mark.parametrize("size", [1 << 10, 4 << 20])
def test_memory_is_used_again_when_no_array_has_it(size):
    memory = OutputMemory()
    first, second = (memory.take(size).view(np.float32).reshape(2, -1) for _ in range(2))
    assert not np.shares_memory(first, second)
    part = first[1:, ::2]
    del first
    third = memory.take(size)
    assert not any(np.shares_memory(third, other) for other in (part, second))  # a part keeps all of its memory
    place = third.ctypes.data
    del third
    assert memory.take(size).ctypes.data == place


def test_results_of_several_runs_are_different_arrays(cache_folder):
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 1] x) => (float[{1 + LARGE // 4096}, 1024] y) <int64[2] shape = {{{1 + LARGE // 4096}, 1024}}>
    {{
        y = Expand(x, shape)
    }}
    """
    executable = korch.optimize(onnx.parser.parse_model(text), measure=False, cache_folder=cache_folder)
    found = [executable(np.full((1, 1), number, np.float32))[0] for number in (1, 2, 3)]
    assert [(array.min(), array.max()) for array in found] == [(1, 1), (2, 2), (3, 3)]
    place = found.pop().ctypes.data
    assert executable(np.ones((1, 1), np.float32))[0].ctypes.data == place
