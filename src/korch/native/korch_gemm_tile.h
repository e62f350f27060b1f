// A strip of columns times rows in vector registers, and how a product is cut into tasks; korch_gemm_split.h
// documents the sizes of a kernel K.
#pragma once

#include "korch_amx.h"

namespace korch_gemm {

template <class K>
inline constexpr long COLUMNS = K::NV * K::W;
template <class K>
using V = korch::Vec<float, K::W>;

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
        korch::load_across<float, K::W, K::W>(x, from, K::B_COLUMN);
#pragma GCC unroll 64
        for (int j = 0; j < K::W; ++j) korch::store<float, K::W>(to + j * COLUMNS<K>, x[j]);
        continue;
      }
      for (long i = 0; i < korch::smaller(K::W, K::DEPTH - k); ++i)
        for (long j = 0; j < K::W; ++j) to[i * COLUMNS<K> + j] = j < left ? from[j * K::B_COLUMN + i] : 0;
    }
  }
}

// A strip of b: its first term, and the elements between terms.
struct Strip {
  const float* from;
  long step;
};

// Store the results of a tile at the edge. They come from memory, so that what is done with each is
// compiled once.
template <class K>
KORCH_INLINE void finish_edge(void* const* buffers, const float* sums, long rows, long i, long m, long n) {
  for (long r = 0; r < rows; ++r)
    for (long v = 0; v < K::NV; ++v) {
      const float* const from = sums + r * COLUMNS<K> + v * K::W;
      const long at = n + v * K::W;
      if (at + K::W <= K::N) {
        K::template finish<K::W>(buffers, korch::load<float, K::W>(from), i, m + r, at);
      } else {
        for (long j = at; j < K::N; ++j) K::template finish<1>(buffers, from[j - at], i, m + r, j);
      }
    }
}

// R rows times NV vectors of columns.
template <class K, int R>
__attribute__((noinline)) void tile(void* const* buffers, const float* a, Strip b, long i, long m, long n) {
  const bool is_whole = K::N % COLUMNS<K> == 0 || n + COLUMNS<K> <= K::N;
  V<K> sum[R][K::NV] = {};
  for (long k = 0; k < K::DEPTH; ++k) {
    V<K> w[K::NV];
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) w[v] = korch::load<float, K::W>(b.from + k * b.step + v * K::W);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      V<K> x = korch::splat<float, K::W>(a[r * K::A_STEP + k]);
#pragma GCC unroll 4
      for (int v = 0; v < K::NV; ++v) sum[r][v] += x * w[v];
    }
  }
  if (is_whole) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < K::NV; ++v) K::template finish<K::W>(buffers, sum[r][v], i, m + r, n + v * K::W);
    return;
  }
  float sums[R * COLUMNS<K>];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) korch::store<float, K::W>(sums + r * COLUMNS<K> + v * K::W, sum[r][v]);
  finish_edge<K>(buffers, sums, R, i, m, n);
}

// How strips of b lie: the elements between terms, 0 if these are no rows, and between strips.
template <class K>
inline constexpr bool IS_PACKED = K::B_STEP == 0 && K::B_COLUMN == 0;
template <class K>
inline constexpr long STRIP_STEP = K::SPLIT_B ? 0 : IS_PACKED<K> ? COLUMNS<K> : K::B_STEP ? K::B_STEP : K::B_COLUMN == 1 ? K::B_ROW : 0;
template <class K>
inline constexpr long NEXT_STRIP = IS_PACKED<K> ? K::DEPTH * COLUMNS<K> : COLUMNS<K>;

// Where the pieces of the strip of columns n begin.
template <class K>
KORCH_INLINE const uint16_t* find_pieces(const float* b, long n) {
  return reinterpret_cast<const uint16_t*>(b) + n / COLUMNS<K> * (korch::blocks(K::DEPTH, korch_amx::TERMS) * korch_amx::STEP);
}

// The strip of columns n, packed first if it does not lie as one.
template <class K>
KORCH_INLINE Strip find_strip(const float* b, long n, float* packed) {
  if constexpr (K::SPLIT_B) {
    korch_amx::add_up(find_pieces<K>(b, n), K::DEPTH, packed);
    return {packed, COLUMNS<K>};
  }
  if constexpr (K::B_COLUMN != 0)
    if (K::B_STEP == 0 || n + COLUMNS<K> > K::N) {
      pack<K>(b, n, packed);
      return {packed, COLUMNS<K>};
    }
  return {b + n / COLUMNS<K> * NEXT_STRIP<K>, STRIP_STEP<K>};
}

// A task's rows [begin, end) of batch i and strips [first, last), and where they are read.
struct Task {
  long i, begin, end, first, last;
  const float *a, *b;
};

template <class K>
KORCH_INLINE Task task_of(long task, const float* a, const float* b) {
  constexpr long BLOCKS = korch::blocks(K::M, K::BLOCK);
  constexpr long STRIPS = korch::blocks(K::N, COLUMNS<K>);
  const long block = task % BLOCKS, rest = task / BLOCKS;
  const long i = rest % K::BATCH, part = rest / K::BATCH;
  return {i, block * K::BLOCK, korch::smaller((block + 1) * K::BLOCK, K::M), STRIPS * part / K::PARTS,
          STRIPS * (part + 1) / K::PARTS, a + K::a(i), b + K::b(i)};
}
template <class K>
inline constexpr long TASKS = K::BATCH * korch::blocks(K::M, K::BLOCK) * K::PARTS;

}  // namespace korch_gemm
