"""Kernels of several sizes that share code: they compute what kernels with all numbers in their texts do."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from korch.measure.compiler import Builder
from korch.measure.toolchain import find_compiler
from korch.provider.families import Families, shape_of
from korch.provider.provider import Kernel
from korch.target import detect_target
from korch.tile.program import TileProgram

HEAD = """// a kernel
#include "{header}"

extern "C" int k_{size}_run(void*, void* const* buffers) {{
  const float* const __restrict i0 = static_cast<const float*>(buffers[0]);
  const float* const __restrict i1 = static_cast<const float*>(buffers[1]);
  float* const __restrict o0 = static_cast<float*>(buffers[2]);
"""

WINDOWS = (
    HEAD
    + """  const auto rows0 = [=](const auto& turn) __attribute__((always_inline)) {{
    for (long t0 = 0; t0 < {taps}; ++t0)
      turn({row} * t0, {weights} * t0);
  }};
  const auto finish0 = [=]<int W>(korch::Vec<float, W> sums, long row, long j) __attribute__((always_inline)) {{
    korch::store<float, W>(o0 + j + {lanes} * row, sums);
  }};
  korch::WindowContraction<{lanes}, {rows}, {size}, {taps}, {stride}, 1, \
{lanes}, {before}, {width}, {panel}, {row}, {last}, false, false>::run(
      korch::Finished{{finish0}}, rows0, i0 - {place}, i1 + 0, {lanes});
  return 0;
}}
"""
)

PRODUCT = (
    HEAD
    + """  const auto finish0 = [=]<int W>(korch::Vec<float, W> sums, long row, long j) \
__attribute__((always_inline)) {{
    korch::store<float, W>(o0 + j + {lanes} * row, sums);
  }};
  korch::Contraction<{lanes}, 6, 1, korch::Rows<{lanes}>, \
korch::Turns<2, {block}, {weights}, korch::Once<{lanes}>>, 1, {lanes}, 1, 0, 0, true, 0, false{tails}>::run(
      korch::Finished{{finish0}}, i0 + 0, i1 + 0, {size}, {lanes}, {lanes});
  return 0;
}}
"""
)


@pytest.fixture(scope="module")
def builder(cache_folder: Path) -> Builder:
    return Builder(detect_target(1, find_compiler().identity).isa, cache_folder)


@pytest.fixture(scope="module")
def lanes() -> int:
    return detect_target(1, find_compiler().identity).lanes


def kernel(size: int, text: str, **numbers: object) -> Kernel:
    return Kernel(f"k_{size}", text.format(size=size, **numbers), program=TileProgram((), ()))


def window(size: int, lanes: int, rows: int, taps: int, stride: int) -> tuple[Kernel, tuple[np.ndarray, ...]]:
    """Return a kernel for one row of an image, with its inputs and its output."""
    before, width = taps // 2, size * stride
    row = width * lanes
    numbers = {"stride": stride, "before": before, "width": width, "panel": taps * taps * lanes, "row": row}
    numbers |= {"taps": taps, "weights": taps * lanes, "last": (taps - 1) * row, "place": before * lanes}
    rng = np.random.default_rng(size)
    image = rng.standard_normal((taps, width, lanes)).astype(np.float32)
    weights = rng.standard_normal((taps, taps, lanes)).astype(np.float32)
    padded = np.pad(image.astype(np.float64), ((0, 0), (before, before), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=1)[:, ::stride]
    wanted = np.einsum("yxct,ytc->xc", windows, weights.astype(np.float64))[:size]
    text = WINDOWS.replace("{header}", "korch_contract_window.h")
    return kernel(size, text, lanes=lanes, rows=min(rows, size), **numbers), (image, weights, wanted)


def product(size: int, lanes: int) -> tuple[Kernel, tuple[np.ndarray, ...]]:
    tails = f", {size % 6}" if size % 6 else ""
    rng = np.random.default_rng(size)
    a = rng.standard_normal((2, size, lanes)).astype(np.float32)
    b = rng.standard_normal((2, lanes, lanes)).astype(np.float32)
    wanted = np.einsum("tmk,tkn->mn", a.astype(np.float64), b.astype(np.float64))
    text = PRODUCT.replace("{header}", "korch_contract.h")
    numbers = {"block": size * lanes, "weights": lanes * lanes, "tails": tails}
    return kernel(size, text, lanes=lanes, **numbers), (a, b, wanted)


def compiles(builder: Builder, texts: Sequence[str]) -> list[bool]:
    return [isinstance(found, Path) for found in builder.compile(texts)]


def shared(builder: Builder, kernels: Sequence[Kernel]) -> list[Kernel]:
    families, found = Families(), []
    for number, one in enumerate(kernels):
        families.learn(0, str(number), one)
    for number, one in enumerate(kernels):
        found += families.share([(str(number), one)], lambda texts: compiles(builder, texts))
    return found


def run(builder: Builder, one: Kernel, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    library = ctypes.CDLL(str(builder.library([one.source, *([one.shared] if one.shared else [])])))
    out = np.full(arrays[2].shape, np.nan, np.float32)
    pointers = (ctypes.c_void_p * 3)(*(array.ctypes.data for array in (*arrays[:2], out)))
    assert library[f"{one.symbol}_run"](None, pointers) == 0
    return out


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (5, 1), (1, 1)])
def test_windows_of_each_number_of_places(builder: Builder, lanes: int, taps: int, stride: int) -> None:
    cases = [window(size, lanes, 4, taps, stride) for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 17)]
    found = shared(builder, [one for one, _ in cases])
    texts = {one.shared for one in found} - {""}
    assert len(texts) == 1 and sum(bool(one.shared) for one in found) == 8  # of 1, 2 and 3 places each has its own
    for one, (_, arrays) in zip(found, cases, strict=True):
        np.testing.assert_allclose(run(builder, one, arrays), arrays[2], rtol=1e-5, atol=1e-5)


def test_products_of_each_number_of_rows(builder: Builder, lanes: int) -> None:
    cases = [product(size, lanes) for size in (1, 2, 5, 6, 7, 12, 13, 20)]
    found = shared(builder, [one for one, _ in cases])
    assert len({one.shared for one in found}) == 1 and found[0].shared
    for one, (plain, arrays) in zip(found, cases, strict=True):
        own = run(builder, one, arrays)
        np.testing.assert_allclose(own, arrays[2], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(own, run(builder, plain, arrays))


def test_numbers_that_do_not_differ_stay_in_the_text(builder: Builder, lanes: int) -> None:
    (one, other) = shared(builder, [product(size, lanes)[0] for size in (6, 12)])
    assert one.shared == other.shared and one.symbol != other.symbol
    assert set(re.findall(r"number\d+|At<\d+>", one.shared)) == {"number0", "At<1>"} or "At<" in one.shared
    assert f"korch::Rows<{lanes}>" in one.shared


def test_kernels_that_do_not_compile_together_stay_as_they_are(builder: Builder, lanes: int) -> None:
    plain = [product(size, lanes)[0] for size in (6, 12)]
    families = Families()
    for number, one in enumerate(plain):
        families.learn(0, str(number), one)
    assert families.share([("0", plain[0])], lambda texts: [False] * len(texts)) == [plain[0]]
    assert families.share([("unknown", plain[0])], lambda texts: []) == [plain[0]]


def test_kernels_with_states_or_libraries_are_not_shared(lanes: int) -> None:
    one = product(6, lanes)[0]
    assert shape_of(one) is not None
    for other in (
        replace(one, has_state=True),
        replace(one, libraries=("dnnl",)),
        replace(one, program=None),
        replace(one, size_input="n"),
    ):
        assert shape_of(other) is None
