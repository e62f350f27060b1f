// A dense convolution of floats: columns are output channels, and the image is read in place, without a copy.
#pragma once

#include "korch_contract_window.h"

namespace korch {

// A row of OUT output pixels ("places"). Tiles of R places by NV vectors of W channels are in registers. Column kx of the
// window of place x is element x * S + kx * D - BEFORE of an image row of WIDTH elements with stride UNIT; `a` points to
// element -BEFORE of the first row. Elements outside of a row count as zero. Weights come in strips of NV vectors; the
// strides of strips, of vectors, and of adjacent window columns are STRIP, VECTOR and TERM.
template <int W, int R, int NV, long OUT, int KW, long S, long D, long UNIT, long BEFORE, long WIDTH, long TERM,
          long VECTOR, long STRIP>
struct DenseContraction {
  static constexpr long REACH = (KW - 1) * D + 1, COLUMNS = NV * W;
  typedef RowTiles<R, OUT, S, REACH, BEFORE, WIDTH> Tiles;

  // COUNT places from AT on (see `RowTiles`), times N vectors; if IS_EDGE, only the first `count` columns exist.
  // `window` calls a function for each row of the window and each channel, with its offsets in a and in b.
  template <int COUNT, int N, long AT, bool IS_EDGE, class Sums, class Rows, typename A, typename B>
  static __attribute__((noinline)) void tile(const Sums& given, const Rows& window, const A* a, const B* b, long x, long n, long count) {
    const Sums sums = given;  // a local copy, which stores can't alias
    const Rows rows = window;
    if constexpr (AT >= 0) x = AT;
    const A* const first = a + x * (S * UNIT);
    const long left = x * S - BEFORE;
    Vec<float, W> sum[COUNT][N];
    begin_block<IS_EDGE, W>(sums, sum, x, n, count);
    rows([&](long from_a, long from_b) __attribute__((always_inline)) {
      const A* const line = first + from_a;
      const auto add = [&](long k) __attribute__((always_inline)) {
        Vec<float, W> w[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) w[v] = load<float, W>(b + from_b + k * TERM + v * VECTOR);
        const A* at = line + k * (D * UNIT);
        asm("" : "+r"(at));  // keeps the compiler from holding elements that windows share in more registers than there are
#pragma GCC unroll 32
        for (long r = 0; r < COUNT; ++r) {
          const long column = (AT >= 0 ? AT * S - BEFORE : left) + r * S + k * D;
          if (AT != INSIDE && (column < 0 || column >= WIDTH)) continue;
          const Vec<float, W> x = splat<float, W>(at[r * (S * UNIT)]);
#pragma GCC unroll 8
          for (int v = 0; v < N; ++v) sum[r][v] += x * w[v];
        }
      };
      if constexpr (AT == INSIDE && KW * COUNT * N > MOST_UNROLLED) {
#pragma GCC unroll 1
        for (long k = 0; k < KW; ++k) add(k);
      } else {
#pragma GCC unroll 16
        for (long k = 0; k < KW; ++k) add(k);
      }
    });
    end_block<IS_EDGE, W>(sums, sum, x, n, count);
  }

  template <int N, bool IS_EDGE, class Sums, class Rows, typename A, typename B>
  static KORCH_INLINE void row(const Sums& sums, const Rows& rows, const A* a, const B* b, long n, long count) {
    Tiles::run([&]<int COUNT, long AT>(long x) __attribute__((always_inline)) {
      tile<COUNT, N, AT, IS_EDGE>(sums, rows, a, b, x, n, count);
    });
  }

  template <class Sums, class Rows, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const Rows& rows, const A* a, const B* b, long columns) {
    if (Sums::IS_WHOLE) columns = (columns + W - 1) / W * W;
    const long whole = columns / COLUMNS * COLUMNS, vectors = columns / W * W;  // as in `Contraction`
    long n = 0;
    for (; n < whole; n += COLUMNS, b += STRIP) row<NV, false>(sums, rows, a, b, n, W);
    if (whole == columns) return;
    n = whole;
    if constexpr (NV > 1)
      if (whole != vectors)
        for (; n < vectors; n += W, b += VECTOR) row<1, false>(sums, rows, a, b, n, W);
    if (n < columns) row<1, true>(sums, rows, a, b, n, columns - n);
  }
};

}  // namespace korch
