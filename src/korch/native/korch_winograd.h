// Winograd's convolution of 3x3 windows, blocked so that a group of tiles stays in the level-2 cache
// through transform, products and inverse transform.
//
// A kernel is a struct K with its sizes as constants:
//   Element              of the image: float, or one of 16 bits that is widened when it is read
//   TILE                 outputs of a tile per axis, 2 or 4; a tile reads EDGE = TILE + 2 inputs
//   W                    lanes of a vector: channels that are handled together
//   C, O                 input and output channels, multiples of W
//   H, WIDTH             the image; OUT_H, OUT_WIDTH the result; DOWN, ACROSS its tiles; TILES in all
//   IN_LAST, OUT_LAST    channels-last, or blocks of W channels
//   NV                   vectors of output channels that are computed together
//   ROWS                 tiles that are computed together in registers
//   GROUP                tiles of a group, a multiple of ROWS
//   V_STEP, M_STEP       floats between the points of a group's transformed tiles and of its sums: an
//                        odd number of lines, for points in the same sets of the first cache would
//                        drive each other out
//   THREADS, SHARED      whether the threads share a group, each with its own output channels
//   BY_POINT             whether weights lie as [EDGE * EDGE][O / (NV * W)][C][NV * W]
//   row(i), column(i)    the image's row or column at padded position i, -1 for FILL, -2 for zero
//   FILL                 the value of the pad before the convolution
//   finish(buffers, y, at, channel)   stores W results, the first of which belongs at `at`
// Weights lie as [O / (NV * W)][EDGE * EDGE][C][NV * W], if not by points.
#pragma once

#include "korch_half.h"

extern "C" int omp_get_thread_num(void);

namespace korch_winograd {

using korch::load;
using korch::splat;
using korch::store;
template <class K>
using V = korch::Vec<float, K::W>;

// B times a column of a tile, in place; `s` is the distance between its elements.
template <class K>
KORCH_INLINE void transform(V<K>* d, int s) {
  if constexpr (K::TILE == 2) {
    V<K> d0 = d[0], d1 = d[s], d2 = d[2 * s], d3 = d[3 * s];
    d[0] = d0 - d2;
    d[s] = d1 + d2;
    d[2 * s] = d2 - d1;
    d[3 * s] = d1 - d3;
  } else {
    V<K> d0 = d[0], d1 = d[s], d2 = d[2 * s], d3 = d[3 * s], d4 = d[4 * s], d5 = d[5 * s];
    V<K> a = d4 - 4.0f * d2, b = d3 - 4.0f * d1, c = d4 - d2, e = 2.0f * (d3 - d1);
    d[0] = 4.0f * d0 - 5.0f * d2 + d4;
    d[s] = a + b;
    d[2 * s] = a - b;
    d[3 * s] = c + e;
    d[4 * s] = c - e;
    d[5 * s] = 4.0f * d1 - 5.0f * d3 + d5;
  }
}

// A times a column, in place: the first TILE elements are the result.
template <class K>
KORCH_INLINE void inverse(V<K>* m, int s) {
  if constexpr (K::TILE == 2) {
    V<K> m0 = m[0], m1 = m[s], m2 = m[2 * s], m3 = m[3 * s];
    m[0] = m0 + m1 + m2;
    m[s] = m1 - m2 - m3;
  } else {
    V<K> sum = m[s] + m[2 * s], difference = m[s] - m[2 * s];
    V<K> far_sum = m[3 * s] + m[4 * s], far_difference = m[3 * s] - m[4 * s];
    m[0] = m[0] + sum + far_sum;
    m[s] = difference + 2.0f * far_difference;
    m[2 * s] = sum + 4.0f * far_sum;
    m[3 * s] = difference + 8.0f * far_difference + m[5 * s];
  }
}

template <class K>
inline constexpr int EDGE = K::TILE + 2;
template <class K>
inline constexpr int POINTS = EDGE<K> * EDGE<K>;
template <class K>
inline constexpr int BLOCK = K::NV * K::W;

template <class K>
KORCH_INLINE const typename K::Element* pixel(const typename K::Element* x, long image, long block, long row, long column) {
  if constexpr (K::IN_LAST) return x + ((image * K::H + row) * K::WIDTH + column) * K::C + block * K::W;
  else return x + (((image * (K::C / K::W) + block) * K::H + row) * K::WIDTH + column) * K::W;
}

// Transform W channels of a tile to v[point * step].
template <class K>
KORCH_INLINE void transform_tile(const typename K::Element* x, long tile, long block, float* v, long step) {
  constexpr int E = EDGE<K>;
  const long image = tile / (K::DOWN * K::ACROSS), place = tile % (K::DOWN * K::ACROSS);
  const long top = place / K::ACROSS * K::TILE, left = place % K::ACROSS * K::TILE;
  V<K> d[E * E];
  for (int i = 0; i < E; ++i) {
    const long row = K::row(top + i);
    for (int j = 0; j < E; ++j) {
      const long column = K::column(left + j);
      d[i * E + j] = row < 0 || column < 0
                         ? splat<float, K::W>(row < -1 || column < -1 ? 0.0f : K::FILL)
                         : load<float, K::W>(pixel<K>(x, image, block, row, column));
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < E; ++j) transform<K>(d + j, E);
#pragma GCC unroll 8
  for (int i = 0; i < E; ++i) transform<K>(d + i * E, 1);
  for (int p = 0; p < E * E; ++p) store<float, K::W>(v + p * step, d[p]);
}

// ROWS tiles times NV vectors of output channels. Meanwhile LINES lines per input channel are fetched
// from `next` on: of the weights that are multiplied after these.
template <class K, int LINES>
__attribute__((noinline)) void multiply(const float* v, const float* u, const float* next, float* m) {
  V<K> sum[K::ROWS][K::NV] = {};
  for (long c = 0; c < K::C; ++c) {
    V<K> w[K::NV];
#pragma GCC unroll 4
    for (int k = 0; k < K::NV; ++k) w[k] = load<float, K::W>(u + c * BLOCK<K> + k * K::W);
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + c * BLOCK<K> + line * 16);
#pragma GCC unroll 32
    for (int r = 0; r < K::ROWS; ++r) {
      V<K> a = splat<float, K::W>(v[r * K::C + c]);
#pragma GCC unroll 4
      for (int k = 0; k < K::NV; ++k) sum[r][k] += a * w[k];
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < K::ROWS; ++r)
#pragma GCC unroll 4
    for (int k = 0; k < K::NV; ++k) store<float, K::W>(m + r * BLOCK<K> + k * K::W, sum[r][k]);
}

// Where the weights of a point and a block of output channels are.
template <class K>
KORCH_INLINE const float* weights_at(const float* weights, long point, long block) {
  constexpr long BLOCKS = K::O / BLOCK<K>;
  return weights + (K::BY_POINT ? point * BLOCKS + block : block * POINTS<K> + point) * K::C * BLOCK<K>;
}

// Transform W channels of a tile's sums m[point * step] back: result i, j is d[i * EDGE + j].
template <class K>
KORCH_INLINE void inverse_tile(const float* m, long step, V<K> (&d)[POINTS<K>]) {
  constexpr int E = EDGE<K>;
  for (int p = 0; p < E * E; ++p) d[p] = load<float, K::W>(m + p * step);
#pragma GCC unroll 8
  for (int j = 0; j < E; ++j) inverse<K>(d + j, E);
#pragma GCC unroll 8
  for (int i = 0; i < K::TILE; ++i) inverse<K>(d + i * E, 1);
}

// Finish and store W channels of a tile's results.
template <class K>
KORCH_INLINE void store_tile(void* const* buffers, const V<K> (&d)[POINTS<K>], long tile, long channel) {
  constexpr int E = EDGE<K>;
  const long image = tile / (K::DOWN * K::ACROSS), place = tile % (K::DOWN * K::ACROSS);
  const long top = place / K::ACROSS * K::TILE, left = place % K::ACROSS * K::TILE;
  const long rows = korch::smaller(K::TILE, K::OUT_H - top);
  const long columns = korch::smaller(K::TILE, K::OUT_WIDTH - left);
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < columns; ++j) {
      long at;
      if constexpr (K::OUT_LAST)
        at = ((image * K::OUT_H + top + i) * K::OUT_WIDTH + left + j) * K::O + channel;
      else
        at = (((image * (K::O / K::W) + channel / K::W) * K::OUT_H + top + i) * K::OUT_WIDTH + left + j) * K::W;
      K::finish(buffers, d[i * E + j], at, channel);
    }
}

// The products of a block of output channels, and their way back.
template <class K>
KORCH_INLINE void finish_block(void* const* buffers, const float* weights, const float* v, float* m,
                               long block, long first, long count) {
  const long used = korch::blocks(count, K::ROWS) * K::ROWS;
  constexpr int LINES = BLOCK<K> < 16 ? 1 : BLOCK<K> / 16;
  constexpr int AT_ONCE = K::GROUP > K::ROWS ? 1 : LINES;
  for (int p = 0; p < POINTS<K>; ++p) {
    const float* const from = weights_at<K>(weights, p, block);
    const float* const next = from + K::C * BLOCK<K>;
    for (long r = 0, line = 0; r < used; r += K::ROWS, line += AT_ONCE) {
      const float* const tiles = v + p * K::V_STEP + r * K::C;
      float* const to = m + p * K::M_STEP + r * BLOCK<K>;
      if (line < LINES && next < weights + K::O * K::C * POINTS<K>) multiply<K, AT_ONCE>(tiles, from, next + line * 16, to);
      else multiply<K, 0>(tiles, from, nullptr, to);
    }
  }
  for (long t = 0; t < count; ++t)
    for (int k = 0; k < K::NV; ++k) {
      V<K> d[POINTS<K>];
      inverse_tile<K>(m + t * BLOCK<K> + k * K::W, K::M_STEP, d);
      store_tile<K>(buffers, d, first + t, block * BLOCK<K> + k * K::W);
    }
}

// x and weights: the buffers' first two roles; workspace: V (one, or one per thread), then M.
template <class K>
inline int run(void* const* buffers, const typename K::Element* x, const float* weights, float* workspace) {
  constexpr long V_SIZE = POINTS<K> * K::V_STEP, M_SIZE = POINTS<K> * K::M_STEP;
  constexpr long GROUPS = korch::blocks(K::TILES, K::GROUP);
  constexpr long BLOCKS = K::O / BLOCK<K>, DEPTH = K::C / K::W;
#pragma omp parallel num_threads(K::THREADS)
  {
    const int me = omp_get_thread_num();
    float* const v = workspace + (K::SHARED ? 0 : me * V_SIZE);
    float* const m = workspace + (K::SHARED ? 1 : K::THREADS) * V_SIZE + me * M_SIZE;
    if constexpr (K::SHARED) {
      for (long g = 0; g < GROUPS; ++g) {
        const long first = g * K::GROUP, count = korch::smaller(K::GROUP, K::TILES - first);
#pragma omp for schedule(static)
        for (long i = 0; i < count * DEPTH; ++i)
          transform_tile<K>(x, first + i / DEPTH, i % DEPTH, v + i / DEPTH * K::C + i % DEPTH * K::W, K::V_STEP);
#pragma omp for schedule(static)
        for (long b = 0; b < BLOCKS; ++b) finish_block<K>(buffers, weights, v, m, b, first, count);
      }
    } else {
#pragma omp for schedule(static) nowait
      for (long g = 0; g < GROUPS; ++g) {
        const long first = g * K::GROUP, count = korch::smaller(K::GROUP, K::TILES - first);
        for (long t = 0; t < count; ++t)
          for (long d = 0; d < DEPTH; ++d)
            transform_tile<K>(x, first + t, d, v + t * K::C + d * K::W, K::V_STEP);
        for (long b = 0; b < BLOCKS; ++b) finish_block<K>(buffers, weights, v, m, b, first, count);
      }
    }
  }
  return 0;
}

}  // namespace korch_winograd
