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
// A kernel is a struct K as in korch_winograd.h with NV * W == 32 and weights BY_POINT, which is also
// what runs if the system does not let us use the units, and a struct S with
//   GROUP, GROUPS        most tiles of a group, and groups of nearly equal size
//   STEP                 floats between the points of a group, an odd number of lines
//   FLOATS               workspace of a thread, besides the group's points
#pragma once

#include "korch_amx.h"
#include "korch_winograd.h"

namespace korch_winograd {

using korch_amx::TERMS;
using korch_amx::TURNS;

inline constexpr long TOGETHER = 2 * korch_amx::EDGE;  // tiles of a block, channels of a strip

template <class K, class S>
struct Sizes {
  static_assert(K::NV * K::W == TOGETHER && K::W == korch_amx::EDGE && K::BY_POINT);
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
  korch_amx::Splitter<true> block{};
  const float* tiles = nullptr;          // of the block
  long left = 0;                         // tiles from this block on
  long turn = 0, parts = 0, turns = 1;   // `parts` are made during `turns` fours of products of tiles

  KORCH_INLINE void set_strip(const float* from, uint16_t* place) { strip = from, to = place, part = 0; }
  KORCH_INLINE void set_tiles(const float* from, uint16_t* place, long count) {
    tiles = from, left = count;
    set_block(place);
  }
  KORCH_INLINE void set_block(uint16_t* place) {
    block = korch_amx::splitter<true>(tiles, K::C, korch::smaller(TOGETHER, left), K::C, place);
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
inline int run_split(void* const* buffers, const typename K::Element* x, const float* weights, float* workspace) {
  constexpr long DEPTH = K::C / K::W;
  if (!korch_amx::is_ready()) return run<K>(buffers, x, weights, workspace);
  float* const v = workspace;
#pragma omp parallel num_threads(K::THREADS) if (K::THREADS > 1)
  {
    const Own<K, S> own(workspace + POINTS<K> * S::STEP + omp_get_thread_num() * S::FLOATS);
    korch_amx::begin();
    for (long g = 0; g < S::GROUPS; ++g) {
      const long first = K::TILES * g / S::GROUPS, count = K::TILES * (g + 1) / S::GROUPS - first;
#pragma omp for schedule(static)
      for (long i = 0; i < count * DEPTH; ++i)
        transform_tile<K>(x, first + i / DEPTH, i % DEPTH, v + i / DEPTH * K::C + i % DEPTH * K::W, S::STEP);
#pragma omp for schedule(static)
      for (long part = 0; part < K::THREADS; ++part)
        multiply_points<K, S>(weights, v, own, POINTS<K> * part / K::THREADS, POINTS<K> * (part + 1) / K::THREADS, count);
#pragma omp for schedule(static)
      for (long t = 0; t < count; ++t) finish_tile<K, S>(buffers, x, weights, v, own, first, t);
    }
    korch_amx::end();
  }
  return 0;
}

}  // namespace korch_winograd
