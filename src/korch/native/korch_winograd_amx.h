// Winograd's convolution whose products run on the matrix units, numbers split into pieces (korch_amx.h).
//
// The transformed tiles of a group lie as [EDGE * EDGE] points of [tiles][C], and a point's sums, as [blocks of
// 32 tiles][O / 32][32][32], take their place: a group may be as large as the level-2 caches of all threads
// together, which is what splitting weights needs to pay. Each thread has its own points, so it reads and
// splits but its part of the weights. A point is a product of matrices: the pieces of its tiles stay while one
// strip of 32 output channels after another is multiplied by all of them. Meanwhile the vector units make the
// pieces of the next strip, and some of those of the next point's tiles. Then the threads share the tiles.
// A result that is no number may have had a factor without pieces, so its tile is computed once more from
// float32 numbers.
//
// If the system does not let us use the units, the vector units multiply in their place.
//
// A kernel is a struct K with its sizes as constants:
//   Element              of the image: float, or one of 16 bits that is widened when it is read
//   TILE                 outputs of a tile per axis, 2 or 4; a tile reads EDGE = TILE + 2 inputs
//   W                    lanes of a vector: channels that are handled together
//   C, O                 input and output channels, multiples of W; O is one of 32
//   H, WIDTH             the image; OUT_H, OUT_WIDTH the result; DOWN, ACROSS its tiles; TILES in all
//   IN_LAST, OUT_LAST    channels-last, or blocks of W channels
//   THREADS              that share a group
//   row(i), column(i)    the image's row or column at padded position i, -1 for FILL, -2 for zero
//   FILL                 the value of the pad before the convolution
//   finish(buffers, y, at, channel)   stores W results, the first of which belongs at `at`
// and a struct S with
//   GROUP, GROUPS        most tiles of a group, and groups of nearly equal size
//   STEP                 floats between the points of a group, an odd number of lines
//   FLOATS               workspace of a thread, besides the group's points
// Weights lie as [EDGE * EDGE][O / 32][C][32].
#pragma once

#include "korch_amx.h"
#include "korch_contract.h"

namespace korch_winograd {

using korch_amx::TERMS;
using korch_amx::TURNS;
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

inline constexpr long TOGETHER = 2 * korch_amx::EDGE;  // tiles of a block, channels of a strip

// Where the weights of a point and a block of output channels are.
template <class K>
KORCH_INLINE const float* weights_at(const float* weights, long point, long block) {
  return weights + (point * (K::O / TOGETHER) + block) * K::C * TOGETHER;
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

template <class K, class S>
struct Sizes {
  static_assert(K::W == korch_amx::EDGE);
  static constexpr long STEPS = korch::blocks(K::C, TERMS), STRIPS = K::O / TOGETHER;
  static constexpr long PIECES = STEPS * korch_amx::STEP;  // of a block of tiles, or of a strip
  static constexpr long PARTS = STEPS * static_cast<long>(korch_amx::PARTS);  // in which they are made
  static constexpr long BLOCKS = korch::blocks(S::GROUP, TOGETHER);
};

// What a thread needs of its workspace: twice the pieces of a point's tiles and of a strip, and a tile's points.
template <class K, class S>
struct Own {
  uint16_t *tiles[2], *strips[2];
  float* again;
  KORCH_INLINE Own(float* from) {
    uint16_t* to = reinterpret_cast<uint16_t*>(from);
    for (uint16_t*& place : tiles) place = to, to += Sizes<K, S>::BLOCKS * Sizes<K, S>::PIECES;
    for (uint16_t*& place : strips) place = to, to += Sizes<K, S>::PIECES;
    again = reinterpret_cast<float*>(to);
  }
};

// Split two terms of a strip of weights, [C][32].
template <class K>
KORCH_INLINE void split_terms(const float* from, uint16_t* to, long part) {
  constexpr long AHEAD = 8 * TOGETHER;  // the hardware sees that it is a stream
  const long step = part / korch_amx::EDGE, pair = part % korch_amx::EDGE;
  to += step * korch_amx::STEP + pair * TERMS;
  from += part * 2 * TOGETHER;
  const bool is_there = K::C % TERMS == 0 || part * 2 < K::C;
#pragma GCC unroll 2
  for (long t = 0; t < 2; ++t) {
    __builtin_prefetch(from + AHEAD + t * korch_amx::EDGE);
    __builtin_prefetch(from + AHEAD + TOGETHER + t * korch_amx::EDGE);
    korch_amx::Floats low = {}, high = {};
    if (is_there) {
      low = load<float, 16>(from + t * korch_amx::EDGE);
      high = load<float, 16>(from + TOGETHER + t * korch_amx::EDGE);
    }
    korch_amx::split(low, high, to + t * korch_amx::TILE, 2 * korch_amx::TILE);
  }
}

// The operands to split next: of a strip, and of a point's tiles, one block at a time. Splitting is spread
// evenly over the products, because the matrix units wait while the vector units are busy.
template <class K, class S>
struct Next {
  typedef Sizes<K, S> P;
  const float* strip = nullptr;
  uint16_t* to = nullptr;
  long part = P::PARTS;                  // of the strip
  korch_amx::Splitter<true, korch_amx::InMemory> block{};
  const float* tiles = nullptr;          // of the block
  long left = 0;                         // tiles from this block on
  long turn = 0, parts = 0, turns = 1;   // `parts` are made during `turns` fours of products of tiles

  KORCH_INLINE void set_strip(const float* from, uint16_t* place) { strip = from, to = place, part = 0; }
  KORCH_INLINE void set_tiles(const float* from, uint16_t* place, long count) {
    tiles = from, left = count;
    set_block(place);
  }
  KORCH_INLINE void set_block(uint16_t* place) {
    block = korch_amx::splitter<true>(korch_amx::InMemory{tiles, K::C}, 0, korch::smaller(TOGETHER, left), K::C, place);
  }
  // Called before a strip is multiplied by `blocks` blocks.
  KORCH_INLINE void pace(long blocks) {
    turns = blocks * P::STEPS * TURNS;
    parts = P::PARTS - part + (left > 0 ? korch::blocks(blocks * P::PARTS, P::STRIPS) : 0);
  }
  KORCH_INLINE void make_part() {
    if (part < P::PARTS) {
      split_terms<K>(strip, to, part++);
    } else if (left > 0) {
      korch_amx::split_part(block, block.part++);
      if (block.part < block.last) return;
      left -= TOGETHER, tiles += TOGETHER * K::C;
      if (left > 0) set_block(block.to + P::PIECES);
    }
  }
  __attribute__((noinline)) void make() {
    for (turn += parts; turn >= turns; turn -= turns) make_part();
  }
  __attribute__((noinline)) void make_strip() {
    while (part < P::PARTS) make_part();
  }
  __attribute__((noinline)) void make_all() {
    while (part < P::PARTS || left > 0) make_part();
  }
};

template <class K, class S, int R>
__attribute__((noinline)) void multiply_block(const uint16_t* tiles, const uint16_t* strip, float* sums, Next<K, S>& next) {
  korch_amx::multiply_tiles<R>(korch_amx::Block{tiles}, strip, Sizes<K, S>::STEPS, sums, false,
                               [&]() __attribute__((always_inline)) { next.make(); });
}

// Replace `count` transformed tiles by their sums, at points [point, end).
template <class K, class S>
inline void multiply_points(const float* weights, float* v, const Own<K, S>& own, long point, long end, long count) {
  typedef Sizes<K, S> P;
  if (point == end) return;
  const long blocks = korch::blocks(count, TOGETHER);
  Next<K, S> next;
  next.set_tiles(v + point * S::STEP, own.tiles[point % 2], count);
  next.set_strip(weights_at<K>(weights, point, 0), own.strips[0]);
  next.make_all();
  for (long turn = 0; point < end; ++point) {
    if (point + 1 < end) next.set_tiles(v + (point + 1) * S::STEP, own.tiles[(point + 1) % 2], count);
    for (long s = 0; s < P::STRIPS; ++s, ++turn) {
      const bool is_last = s + 1 == P::STRIPS;
      if (point + is_last < end)
        next.set_strip(weights_at<K>(weights, point + is_last, is_last ? 0 : s + 1), own.strips[(turn + 1) % 2]);
      next.pace(blocks);
      for (long b = 0; b < blocks; ++b) {
        const uint16_t *tiles = own.tiles[point % 2] + b * P::PIECES, *strip = own.strips[turn % 2];
        float* const sums = v + point * S::STEP + (b * P::STRIPS + s) * (TOGETHER * TOGETHER);
        if (count - b * TOGETHER > korch_amx::EDGE) multiply_block<K, S, 2>(tiles, strip, sums, next);
        else multiply_block<K, S, 1>(tiles, strip, sums, next);
      }
      next.make_strip();
    }
    next.make_all();
  }
}

// The same on vector units. Transformed tiles are copied first, as sums take their place.
template <class K, class S>
inline void multiply_on_vectors(const float* weights, float* v, const Own<K, S>& own, long point, long end, long count) {
  constexpr long STRIPS = Sizes<K, S>::STRIPS;
  typedef korch::Contraction<K::W, 8, 2, korch::Rows<K::C>, korch::Once<>, 1, TOGETHER, 1, K::W, 0, true, 0, false, 7, 6, 5, 4, 3, 2, 1> Product;
  float* const tiles = reinterpret_cast<float*>(own.tiles[0]);
  for (; point < end; ++point) {
    memcpy(tiles, v + point * S::STEP, count * K::C * sizeof(float));
    for (long s = 0; s < STRIPS; ++s)
      for (long t = 0; t < count; t += TOGETHER) {
        float* const to = v + point * S::STEP + (t / TOGETHER * STRIPS + s) * (TOGETHER * TOGETHER);
        const long rows = korch::smaller(TOGETHER, count - t);
        Product::run(korch::Stored<TOGETHER, true>{{to}}, tiles + t * K::C, weights_at<K>(weights, point, s), rows, TOGETHER, K::C);
      }
  }
}

// Compute W channels of a tile from its transformed points, [EDGE * EDGE][C].
template <class K>
__attribute__((noinline)) void tile_again(void* const* buffers, const float* weights, const float* v, long tile, long channel) {
  alignas(64) float sums[POINTS<K> * K::W];
  for (long p = 0; p < POINTS<K>; ++p) {
    const float* const u = weights_at<K>(weights, p, channel / TOGETHER) + channel % TOGETHER;
    V<K> sum = {};
    for (long c = 0; c < K::C; ++c) sum += splat<float, K::W>(v[p * K::C + c]) * load<float, K::W>(u + c * TOGETHER);
    store<float, K::W>(sums + p * K::W, sum);
  }
  V<K> d[POINTS<K>];
  inverse_tile<K>(sums, K::W, d);
  store_tile<K>(buffers, d, tile, channel);
}

// Whether a tile's results are numbers.
template <class K>
KORCH_INLINE bool is_finite(const V<K> (&d)[POINTS<K>]) {
  V<K> zero = {};
#pragma GCC unroll 4
  for (int i = 0; i < K::TILE; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < K::TILE; ++j) zero += d[i * EDGE<K> + j] * 0.0f;
  alignas(64) float sums[K::W];
  store<float, K::W>(sums, zero);
  return korch_amx::are_finite(sums, K::W);
}

// Transform a tile's sums back: those of the group's tile number t.
template <class K, class S>
KORCH_INLINE void finish_tile(void* const* buffers, const typename K::Element* x, const float* weights, const float* v,
                              const Own<K, S>& own, long first, long t) {
  bool is_transformed = false;
  for (long channel = 0; channel < K::O; channel += K::W) {
    const long block = t / TOGETHER * Sizes<K, S>::STRIPS + channel / TOGETHER;
    V<K> d[POINTS<K>];
    inverse_tile<K>(v + (block * TOGETHER + t % TOGETHER) * TOGETHER + channel % TOGETHER, S::STEP, d);
    if (is_finite<K>(d)) {
      store_tile<K>(buffers, d, first + t, channel);
      continue;
    }
    for (long c = 0; c < K::C && !is_transformed; c += K::W)
      transform_tile<K>(x, first + t, c / K::W, own.again + c, K::C);
    is_transformed = true;
    tile_again<K>(buffers, weights, own.again, first + t, channel);
  }
}

template <class K, class S>
inline int run_with(bool has_units, void* const* buffers, const typename K::Element* x, const float* weights, float* workspace) {
  constexpr long DEPTH = K::C / K::W;
  float* const v = workspace;
#pragma omp parallel num_threads(K::THREADS) if (K::THREADS > 1)
  {
    const Own<K, S> own(workspace + POINTS<K> * S::STEP + omp_get_thread_num() * S::FLOATS);
    if (has_units) korch_amx::begin();
    for (long g = 0; g < S::GROUPS; ++g) {
      const long first = K::TILES * g / S::GROUPS, count = K::TILES * (g + 1) / S::GROUPS - first;
#pragma omp for schedule(static)
      for (long i = 0; i < count * DEPTH; ++i)
        transform_tile<K>(x, first + i / DEPTH, i % DEPTH, v + i / DEPTH * K::C + i % DEPTH * K::W, S::STEP);
#pragma omp for schedule(static)
      for (long part = 0; part < K::THREADS; ++part) {
        const long point = POINTS<K> * part / K::THREADS, end = POINTS<K> * (part + 1) / K::THREADS;
        if (has_units) multiply_points<K, S>(weights, v, own, point, end, count);
        else multiply_on_vectors<K, S>(weights, v, own, point, end, count);
      }
#pragma omp for schedule(static)
      for (long t = 0; t < count; ++t) finish_tile<K, S>(buffers, x, weights, v, own, first, t);
    }
    if (has_units) korch_amx::end();
  }
  return 0;
}

template <class K, class S>
inline int run_split(void* const* buffers, const typename K::Element* x, const float* weights, float* workspace) {
  return run_with<K, S>(korch_amx::is_ready(), buffers, x, weights, workspace);
}

}  // namespace korch_winograd
