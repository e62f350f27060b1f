// Matrix products with what reads and writes them fused: y[b][m][n] = finish(sum over k of a * w).
//
// A kernel is a struct K with its sizes as constants:
//   BATCH, M, N, DEPTH     of the product; DEPTH is the number of terms
//   W, NV                  lanes of a vector; vectors of columns that are computed together
//   ROWS                   rows that are computed together in registers
//   BLOCK                  rows of a block, a multiple of ROWS unless it is all of M
//   PARTS                  column parts that are separate tasks
//   A_STEP                 elements between rows of a, whose terms are neighbours
//   B_STEP                 elements between terms of b, whose columns are neighbours; 0 if b is
//                          packed as [N / (NV * W)][DEPTH][NV * W], or has to be packed
//   IS_AHEAD               whether the strip of b that follows is fetched while one is multiplied
//   B_ROW, B_COLUMN        elements between terms and between columns of b, one of them 1, if each
//                          task has to pack what it reads; else 0
//   THREADS
//   a(i), b(i)             where the matrices of batch i begin
//   finish<L>(buffers, y, i, m, n)   stores results n to n + L - 1 of row m of batch i
#pragma once

#include "korch_tile.h"

extern "C" int omp_get_thread_num(void);

namespace korch_gemm {

template <class K>
inline constexpr long COLUMNS = K::NV * K::W;
// Floats that one prefetch brings, as far as they are of a strip's row.
template <class K>
inline constexpr long LINE = COLUMNS<K> < 16 ? COLUMNS<K> : 16;
template <class K>
using V = korch::Vec<float, K::W>;

// Transpose W vectors of W elements, in log W rounds of exchanges between pairs.
template <int W>
KORCH_INLINE void transpose(korch::Vec<float, W>* x) {
#ifdef __clang__
  float y[W][W];
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < W; ++j) y[j][i] = x[i][j];
  for (int i = 0; i < W; ++i) x[i] = korch::load<float, W>(y[i]);
#else
#pragma GCC unroll 8
  for (int s = 1; s < W; s *= 2) {
    korch::Vec<int32_t, W> low, high;
#pragma GCC unroll 64
    for (int j = 0; j < W; ++j) {
      low[j] = j & s ? W + j - s : j;
      high[j] = j & s ? W + j : j + s;
    }
#pragma GCC unroll 64
    for (int i = 0; i < W; ++i) {
      if (i & s) continue;
      korch::Vec<float, W> a = x[i], b = x[i + s];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + s] = __builtin_shuffle(a, b, high);
    }
  }
#endif
}

// Pack columns [first, first + NV * W) of b as [DEPTH][NV * W]; what is beyond N is zero.
template <class K>
KORCH_INLINE void pack(const float* b, long first, float* strip) {
  if constexpr (K::B_COLUMN == 1) {
    const long count = korch::smaller(COLUMNS<K>, K::N - first);
    for (long k = 0; k < K::DEPTH; ++k) {
      const float* const from = b + k * K::B_ROW + first;
      float* const to = strip + k * COLUMNS<K>;
      if (count == COLUMNS<K>) {
#pragma GCC unroll 4
        for (int v = 0; v < K::NV; ++v) korch::store<float, K::W>(to + v * K::W, korch::load<float, K::W>(from + v * K::W));
        continue;
      }
      for (long j = 0; j < count; ++j) to[j] = from[j];
      for (long j = count; j < COLUMNS<K>; ++j) to[j] = 0.0f;
    }
    return;
  }
  for (int v = 0; v < K::NV; ++v) {
    const long left = K::N - first - v * K::W;
    for (long k = 0; k < K::DEPTH; k += K::W) {
      float* const to = strip + k * COLUMNS<K> + v * K::W;
      const float* const from = b + (first + v * K::W) * K::B_COLUMN + k;
      if (left >= K::W && k + K::W <= K::DEPTH) {
        V<K> x[K::W];
#pragma GCC unroll 64
        for (int j = 0; j < K::W; ++j) x[j] = korch::load<float, K::W>(from + j * K::B_COLUMN);
        transpose<K::W>(x);
#pragma GCC unroll 64
        for (int j = 0; j < K::W; ++j) korch::store<float, K::W>(to + j * COLUMNS<K>, x[j]);
        continue;
      }
      for (long i = 0; i < korch::smaller(K::W, K::DEPTH - k); ++i)
        for (long j = 0; j < K::W; ++j) to[i * COLUMNS<K> + j] = j < left ? from[j * K::B_COLUMN + i] : 0;
    }
  }
}

// R rows times NV vectors of columns. With IS_AHEAD, one line from `next` on is fetched per term.
template <class K, int R, bool IS_AHEAD>
__attribute__((noinline)) void tile(void* const* buffers, const float* a, const float* b, const float* next, long i, long m, long n) {
  constexpr long STEP = K::B_STEP ? K::B_STEP : COLUMNS<K>;
  V<K> sum[R][K::NV] = {};
  for (long k = 0; k < K::DEPTH; ++k) {
    V<K> w[K::NV];
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) w[v] = korch::load<float, K::W>(b + k * STEP + v * K::W);
    if constexpr (IS_AHEAD) __builtin_prefetch(next + k * LINE<K>);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      V<K> x = korch::splat<float, K::W>(a[r * K::A_STEP + k]);
#pragma GCC unroll 4
      for (int v = 0; v < K::NV; ++v) sum[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) {
      const long at = n + v * K::W;
      if (K::N % COLUMNS<K> == 0 || at + K::W <= K::N) {
        K::template finish<K::W>(buffers, sum[r][v], i, m + r, at);
      } else {
        for (long j = at; j < K::N; ++j) K::template finish<1>(buffers, sum[r][v][j - at], i, m + r, j);
      }
    }
}

template <class K>
inline int run(void* const* buffers, const float* a, const float* b, float* workspace) {
  constexpr long BLOCKS = (K::M + K::BLOCK - 1) / K::BLOCK;
  constexpr long STRIPS = (K::N + COLUMNS<K> - 1) / COLUMNS<K>;
  constexpr int TAIL = K::M % K::ROWS;
#pragma omp parallel for num_threads(K::THREADS) schedule(static) if (K::THREADS > 1)
  for (long task = 0; task < K::BATCH * BLOCKS * K::PARTS; ++task) {
    const long block = task % BLOCKS, rest = task / BLOCKS;
    const long i = rest % K::BATCH, part = rest / K::BATCH;
    const long first = STRIPS * part / K::PARTS, last = STRIPS * (part + 1) / K::PARTS;
    const long end = korch::smaller((block + 1) * K::BLOCK, K::M);
    for (long s = first; s < last; ++s) {
      const float* strip = b + K::b(i);
      if constexpr (K::B_COLUMN != 0) {
        float* const packed = workspace + omp_get_thread_num() * K::DEPTH * COLUMNS<K>;
        pack<K>(strip, s * COLUMNS<K>, packed);
        strip = packed;
      } else {
        strip += s * COLUMNS<K> * (K::B_STEP ? 1 : K::DEPTH);
      }
      long m = block * K::BLOCK;
      if constexpr (K::IS_AHEAD) {
        const float* next = strip + K::DEPTH * COLUMNS<K>;
        const float* const beyond = s + 1 < last ? next + K::DEPTH * COLUMNS<K> : next;
        for (; m + K::ROWS <= end && next < beyond; m += K::ROWS, next += K::DEPTH * LINE<K>)
          tile<K, K::ROWS, true>(buffers, a + K::a(i) + m * K::A_STEP, strip, next, i, m, s * COLUMNS<K>);
      }
      for (; m + K::ROWS <= end; m += K::ROWS)
        tile<K, K::ROWS, false>(buffers, a + K::a(i) + m * K::A_STEP, strip, nullptr, i, m, s * COLUMNS<K>);
      if constexpr (TAIL != 0)
        if (m < end) tile<K, TAIL, false>(buffers, a + K::a(i) + m * K::A_STEP, strip, nullptr, i, m, s * COLUMNS<K>);
    }
  }
  return 0;
}

}  // namespace korch_gemm
