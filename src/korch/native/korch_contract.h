// A block of a product, added to a tile of float32: R rows times NV vectors of W columns in registers.
// Operands are tiles or memory, of float32 or of 16 bits that are widened when they are read.
#pragma once

#include "korch_half.h"

extern "C" int omp_get_thread_num(void);

namespace korch {

// The element (r, k) of a is at a[r * ROW + k * TERM]. Vector v of term k of b is at
// b[v * VECTOR + k * TERM], its columns COLUMN apart. Nothing beyond `columns` is read or written, but
// for panels (IS_PANEL): these and the tile have whole vectors.
template <int W, long A_ROW, long A_TERM, long B_TERM, long B_COLUMN, long B_VECTOR, long OUT_ROW, bool IS_PANEL>
struct Contraction {
  template <int R, int NV, int V, typename A, typename B>
  static __attribute__((noinline)) void tile(float* out, const A* a, const B* b, long terms) {
    Vec<float, V> sum[R][NV];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = load<float, V>(out + r * OUT_ROW + v * W);
    for (long k = 0; k < terms; ++k) {
      Vec<float, V> w[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const B* const at = b + v * B_VECTOR + k * B_TERM;
        if constexpr (B_COLUMN == 1) w[v] = load<float, V>(at);
        else w[v] = strided<float, V>(at, B_COLUMN);
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const Vec<float, V> x = splat<float, V>(static_cast<float>(a[r * A_ROW + k * A_TERM]));
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] += x * w[v];
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store<float, V>(out + r * OUT_ROW + v * W, sum[r][v]);
  }

  // All rows of some columns: blocks of R rows, then of half as many.
  template <int R, int NV, int V, typename A, typename B>
  static KORCH_INLINE void rows(float* out, const A* a, const B* b, long count, long terms) {
    long r = 0;
    for (; r + R <= count; r += R) tile<R, NV, V>(out + r * OUT_ROW, a + r * A_ROW, b, terms);
    if constexpr (R > 1)
      if (r < count) rows<R / 2, NV, V>(out + r * OUT_ROW, a + r * A_ROW, b, count - r, terms);
  }

  template <int R, int NV, typename A, typename B>
  static KORCH_INLINE void run(float* out, const A* a, const B* b, long count, long columns, long terms) {
    if (IS_PANEL) columns = (columns + W - 1) / W * W;
    long n = 0;
    for (; n + NV * W <= columns; n += NV * W)
      rows<R, NV, W>(out + n, a, b + n / W * B_VECTOR, count, terms);
    for (; n + W <= columns; n += W) rows<R, 1, W>(out + n, a, b + n / W * B_VECTOR, count, terms);
    if constexpr (!IS_PANEL)
      for (; n < columns; ++n) rows<R, 1, 1>(out + n, a, b + n * B_COLUMN, count, terms);
  }
};

}  // namespace korch
