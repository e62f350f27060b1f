"""Constants that are kept in a file: they have the same elements, and only constants that rules computed are there."""

from pathlib import Path

import numpy as np
import pytest

from korch.limits import SearchLimits
from korch.primitive.graph import Constant, GraphBuilder, PrimitiveGraph
from korch.primitive.types import DType, ValueType
from korch.segments.spill import SPILLED_BYTES, Spill

ROWS = SPILLED_BYTES // 32


def graph(*arrays: np.ndarray) -> PrimitiveGraph:
    builder = GraphBuilder()
    x = builder.input("x", ValueType((4, ROWS), DType.F32))
    for i, array in enumerate(arrays):
        builder.output(f"y{i}", builder.add("matmul", (x, builder.constant(array))))
    return builder.freeze()


def large(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, 8)).astype(np.float32)


def in_file(constant: Constant) -> bool:
    return isinstance(constant.array, np.memmap)


def test_what_a_rule_computed_waits_in_a_file(tmp_path: Path) -> None:
    source, found = graph(large(0)), graph(large(0), large(1), large(2)[:, :4] + 1.0)
    taken = Spill(tmp_path, SearchLimits(kept_bytes=0)).take(found, source)
    assert (taken.types, taken.primitives) == (found.types, found.primitives)
    for value, constant in found.constants.items():
        assert taken.constants[value] == constant
        np.testing.assert_array_equal(taken.constants[value].array, constant.array)
    assert [in_file(c) for c in taken.constants.values()] == [False, True, False]
    assert list(tmp_path.iterdir()) == []


def test_a_constant_is_written_once_and_what_fits_is_kept(tmp_path: Path) -> None:
    source, found = graph(large(0)), graph(large(1), large(2))
    spill = Spill(tmp_path, SearchLimits(kept_bytes=SPILLED_BYTES))
    first, second = spill.take(found, source), spill.take(found, source)
    files = [c for c in first.constants.values() if in_file(c)]
    assert len(files) == 1
    assert files[0] in [c for c in second.constants.values() if in_file(c)]


def test_without_a_folder_to_write_to_it_stays_in_memory(tmp_path: Path) -> None:
    source, found = graph(large(0)), graph(large(1))
    taken = Spill(tmp_path / "missing", SearchLimits(kept_bytes=0)).take(found, source)
    assert not any(map(in_file, taken.constants.values()))


@pytest.mark.parametrize("array", [np.ones((ROWS, 8), np.float32), large(3)[:16].repeat(2, 0)])
def test_small_and_uniform_constants_stay(tmp_path: Path, array: np.ndarray) -> None:
    builder = GraphBuilder()
    builder.output("y", builder.constant(array))
    taken = Spill(tmp_path, SearchLimits(kept_bytes=0)).take(builder.freeze(), graph(large(0)))
    assert not any(map(in_file, taken.constants.values()))
