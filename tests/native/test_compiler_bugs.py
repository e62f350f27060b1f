"""Loops that a compiler once translated incorrectly: with our flags the code must be correct."""

import ctypes

import numpy as np

# GCC 12 with -O3 and AVX2 or AVX-512 writes 0 to rows 20 or 24: it takes the first rows of a
# vector of guarded loads for masked out.
GUARDED_LOADS = """
extern "C" void korch_test_guarded(const float* __restrict in, float* __restrict out) {
  for (int row = 0; row < 34; ++row)
    for (int column = 0; column < 2; ++column) {
      float low = row < 17 ? in[2 * row + column] : 0.0f;
      float high = row >= 17 ? in[2 * row + column - 34] : 0.0f;
      out[2 * row + column] = row < 17 ? low : high;
    }
}
"""


def test_guarded_loads_of_pairs(builder):
    library = ctypes.CDLL(str(builder.library([GUARDED_LOADS])))
    given, found = np.arange(1, 35, dtype=np.float32), np.full(68, np.nan, np.float32)
    pointers = (ctypes.c_void_p(a.ctypes.data) for a in (given, found))
    library.korch_test_guarded(*pointers)
    np.testing.assert_array_equal(found, np.concatenate([given, given]))


def test_whole_numbers_wrap(builder):
    """A group may compute x < x + 1 for the greatest x: no compiler may take it for true."""
    source = """#include "korch_tile.h"
    extern "C" void korch_test_wrap(const int32_t* in, uint8_t* out) {
      for (int i = 0; i < 64; ++i)
        korch::store<uint8_t, 1>(out + i, korch::op_less<int32_t, 1>(in[i], in[i] + 1));
    }
    """
    library = ctypes.CDLL(str(builder.library([source])))
    given = np.full(64, np.iinfo(np.int32).max, np.int32)
    found = np.full(64, 9, np.uint8)
    library.korch_test_wrap(ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(found.ctypes.data))
    assert not found.any()


def test_whole_numbers_over_themselves(builder):
    """GCC 12 takes x / x for a truth value, and gives -1 where a vector of them is used further."""
    source = """#include "korch_tile.h"
    using namespace korch;
    extern "C" void korch_test_ratio(const int8_t* in, int8_t* out) {
      const auto body = [&]<int W>(long i) __attribute__((always_inline)) {
        const Vec<int8_t, W> x = load<int8_t, W>(in + i);
        const Vec<int8_t, W> y = op_bitwise_not<int8_t, W>(op_div<int8_t, W>(x, x));
        store<int8_t, W>(out + i, op_max<int8_t, W>(y, y));
      };
      for (long i = 0; i + 8 <= 8; i += 8) body.template operator()<8>(i);
    }
    """
    library = ctypes.CDLL(str(builder.library([source])))
    given = np.array([1, 2, 3, -4, 0, -1, 127, -128], np.int8)
    found = np.zeros(8, np.int8)
    library.korch_test_ratio(*(ctypes.c_void_p(a.ctypes.data) for a in (given, found)))
    np.testing.assert_array_equal(found, np.where(given == 0, -1, -2))
