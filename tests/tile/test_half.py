"""16-bit floats in C++: each conversion, compared with ml_dtypes and NumPy."""

import ctypes

import ml_dtypes
import numpy as np

KINDS = {"half": np.float16, "bfloat16": ml_dtypes.bfloat16}
SOURCE = """#include "korch_half.h"
using namespace korch;
#define BOTH(S, W)                                                                    \\
  extern "C" void S##_widen##W(const S* a, float* y, long n) {                        \\
    for (long i = 0; i < n; i += W) store<float, W>(y + i, load<float, W>(a + i));    \\
  }                                                                                   \\
  extern "C" void S##_narrow##W(const float* a, S* y, long n) {                       \\
    for (long i = 0; i < n; i += W) store<float, W>(y + i, load<float, W>(a + i));    \\
  }
BOTH(half, 1) BOTH(half, 8) BOTH(bfloat16, 1) BOTH(bfloat16, 8)
"""


def convert(library, name, array, kind):
    result = np.zeros(array.size, kind)
    run = getattr(library, name)
    run(ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(result.ctypes.data), ctypes.c_long(array.size))
    return result


def test_every_bit_pattern_and_every_tie(builder):
    library = ctypes.CDLL(str(builder.library([SOURCE], [])))
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for name, kind in KINDS.items():
        wide = patterns.view(kind).astype(np.float32)
        middle = wide.view(np.uint32)[:, None] + np.array(
            [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32
        )
        values = np.ascontiguousarray(middle.reshape(-1)).view(np.float32)
        values = np.concatenate([values, np.geomspace(1e-9, 1e-4, 8000, dtype=np.float32)])
        with np.errstate(all="ignore"):
            rounded = values.astype(kind)
        for width in (1, 8):
            np.testing.assert_array_equal(convert(library, f"{name}_widen{width}", patterns, np.float32), wide)
            found = convert(library, f"{name}_narrow{width}", values, np.uint16).view(kind)
            is_nan = np.isnan(values)
            assert np.isnan(found[is_nan]).all()
            same = found[~is_nan].view(np.uint16) == rounded[~is_nan].view(np.uint16)
            assert same.all(), (name, width, values[~is_nan][~same][:3])
