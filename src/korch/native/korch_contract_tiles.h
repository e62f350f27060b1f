// A block of a matrix product of signed or unsigned bytes on matrix units, with exact 32-bit sums.
//
// Rows are read in place: a tile consists of at most 16 rows and some contiguous terms. The rows come in lines, like the
// pixels of an image; a product of matrices has one line. All tiles of a line have the same height, so the last tile may
// overlap the one before, and nothing beyond a line is read. b comes in strips of 32 columns, in which four terms of a
// column are adjacent, and terms beyond the last are 0, so that the elements of a there do not matter. While the matrix
// units multiply, the vector units finish the previous sums and prefetch the next strip.
#pragma once

#include "korch_amx.h"
#include "korch_contract.h"

namespace korch {

// Sums that are stored to a tile; rows are ROW elements apart.
template <long ROW>
struct StoredInts {
  int32_t* tile;
  template <int V>
  KORCH_INLINE void end(long r, long n, Vec<int32_t, V> sum) const { store<int32_t, V>(tile + r * ROW + n, sum); }
};

}  // namespace korch

namespace korch_amx {

// ROW and LINE are the bytes between rows of a line and between lines, WIDTH the rows of a line (0 if only known at run
// time), FOURS the groups of four terms in a step, STRIP_BYTES the bytes of a strip of b. Terms come in LAST contiguous
// steps, repeated INNER times INNER_BYTES apart, all of it OUTER times OUTER_BYTES apart. If STRIPS_PASS, all rows are kept
// in the cache while strips are streamed; otherwise strips are kept while rows are streamed.
template <long ROW, long LINE, long WIDTH, long FOURS, long STRIP_BYTES, bool STRIPS_PASS, long LAST, long INNER = 1,
          long INNER_BYTES = 0, long OUTER = 1, long OUTER_BYTES = 0>
struct ByteTiles {
  static constexpr long STRIDE = ROW, QUADS = FOURS, STRIP = STRIP_BYTES, STEPS = LAST * INNER * OUTER;
  static constexpr long TERM_BYTES = 4 * QUADS, COLUMN_BYTES = 4 * TOGETHER, STEP_BYTES = QUADS * COLUMN_BYTES;
  static constexpr bool STRIPS_GO_BY = STRIPS_PASS;
  static KORCH_INLINE long terms(long step) {
    return step % LAST * TERM_BYTES + step / LAST % INNER * INNER_BYTES + step / (LAST * INNER) * OUTER_BYTES;
  }

  template <class Sums, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const A* a, const B* b, long rows, long columns);
};

// Compute the products of R tiles of rows and C tiles of columns, which may have fewer rows than 16: sums[16 R][32].
template <class G, int R, int C, bool A_SIGNED, bool B_SIGNED, class Beside>
KORCH_INLINE void multiply_bytes(const char* first, const char* second, const char* b, int32_t* sums, Beside beside) {
  KORCH_TILE_ZERO(0);
  if constexpr (C == 2) KORCH_TILE_ZERO(1);
  if constexpr (R == 2) KORCH_TILE_ZERO(2);
  if constexpr (R * C == 4) KORCH_TILE_ZERO(3);
  KORCH_TILE_LOAD(4, first, G::STRIDE);
  KORCH_TILE_LOAD(6, b, G::COLUMN_BYTES);
  if constexpr (C == 2) KORCH_TILE_LOAD(7, b + 4 * EDGE, G::COLUMN_BYTES);
  if constexpr (R == 2) KORCH_TILE_LOAD(5, second, G::STRIDE);
  Floats zero = {};
  const auto step = [&]<bool IS_LAST>(const char* next, long at) __attribute__((always_inline)) {
    stay_awake(zero);
    KORCH_TILE_DOT_BYTES(0, 4, 6);
    if constexpr (C == 2) KORCH_TILE_DOT_BYTES(1, 4, 7);
    if constexpr (!IS_LAST) KORCH_TILE_LOAD(4, first + at, G::STRIDE);
    if constexpr (R == 2) KORCH_TILE_DOT_BYTES(2, 5, 6);
    if constexpr (!IS_LAST) KORCH_TILE_LOAD(6, next, G::COLUMN_BYTES);
    if constexpr (R * C == 4) KORCH_TILE_DOT_BYTES(3, 5, 7);
    if constexpr (R == 2 && !IS_LAST) KORCH_TILE_LOAD(5, second + at, G::STRIDE);
    if constexpr (C == 2 && !IS_LAST) KORCH_TILE_LOAD(7, next + 4 * EDGE, G::COLUMN_BYTES);
    beside();
  };
  for (long s = 1; s < G::STEPS; ++s) step.template operator()<false>(b + s * G::STEP_BYTES, G::terms(s));
  step.template operator()<true>(nullptr, 0);
  KORCH_TILE_STORE(0, sums);
  if constexpr (C == 2) KORCH_TILE_STORE(1, sums + EDGE);
  if constexpr (R == 2) KORCH_TILE_STORE(2, sums + EDGE * TOGETHER);
  if constexpr (R * C == 4) KORCH_TILE_STORE(3, sums + EDGE * TOGETHER + EDGE);
}

template <class G, class Sums, bool A_SIGNED, bool B_SIGNED>
struct ByteProduct {
  const Sums sums;  // a local copy, which stores can't alias
  const char *const a, *const b;
  const long line;  // bytes between lines
  const long lines, width, columns;
  const long across = korch::blocks(width, EDGE), height = korch::blocks(width, across);  // the tiles of a line, and the rows of a tile

  // A tile of rows: its address, the number of its first row, and how many rows it shares with the tile before.
  struct Tile {
    const char* from;
    long first, shared;
  };
  // The position of the next tile.
  struct Walk {
    long line = 0, at = 0;
  };
  // The sums of two tiles whose rows are still to be finished.
  struct Pending {
    const int32_t* from = nullptr;
    Tile tiles[2] = {};
    long at = 0, end = 0, column = 0;
  };
  struct Strip {
    const char* from;
    long left, each;  // cache lines to prefetch in total, and during one step
  };

  // Finish V whole vectors of a row, or, if V is 0, all columns up to the end.
  template <int V>
  static KORCH_INLINE void finish_row(const Sums& to, const int32_t* from, long row, long n, long end) {
    const auto finish = [&]<int W>() __attribute__((always_inline)) {
      to.template end<W>(row, n, korch::load<int32_t, W>(from));
      n += W, from += W;
    };
    if constexpr (V > 0) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) finish.template operator()<16>();
    } else {
      if (n + 16 <= end) finish.template operator()<16>();
      if (n + 8 <= end) finish.template operator()<8>();
      while (n < end) finish.template operator()<1>();
    }
  }
  // Finish up to `count` rows.
  __attribute__((noinline)) void finish(Pending& pending, long count) const {
    const Sums to = sums;  // a local copy, which stores can't alias
    const long end = korch::smaller(columns, pending.column + TOGETHER), n = pending.column, rows = height;
    while (count > 0 && pending.at < pending.end) {
      const long tile = pending.at >= rows, r = pending.at - tile * rows, some = korch::smaller(count, rows - r);
      const long first = pending.tiles[tile].first, begin = korch::larger(r, pending.tiles[tile].shared), last = r + some;
      const int32_t* from = pending.from + (tile * EDGE + begin) * TOGETHER;
      if (n + TOGETHER == end) {
        for (long i = begin; i < last; ++i, from += TOGETHER) finish_row<2>(to, from, first + i, n, end);
      } else if (n + EDGE == end) {
        for (long i = begin; i < last; ++i, from += TOGETHER) finish_row<1>(to, from, first + i, n, end);
      } else {
        for (long i = begin; i < last; ++i, from += TOGETHER) finish_row<0>(to, from, first + i, n, end);
      }
      pending.at += some, count -= some;
    }
  }
  __attribute__((noinline)) void work_beside(Strip& next, Pending& before, long count) const {
    for (long i = korch::smaller(next.each, next.left); i > 0; --i, --next.left, next.from += 64)
      __builtin_prefetch(next.from, 0, 2);
    if (before.at < before.end) finish(before, count);
  }

  template <int R, int C>
  __attribute__((noinline)) void multiply(const char* first, const char* second, const char* strip, int32_t* to, Strip& next,
                                          Pending& before) const {
    const long each = korch::blocks(2 * height, G::STEPS);
    multiply_bytes<G, R, C, A_SIGNED, B_SIGNED>(first, second, strip, to, [&]() __attribute__((always_inline)) {
      if (next.left > 0 || before.at < before.end) work_beside(next, before, each);
    });
  }

  KORCH_INLINE Tile next_of(Walk& walk) const {
    const long x = korch::smaller(walk.at * height, width - height);
    const Tile found{a + walk.line * line + x * G::STRIDE, walk.line * width + x, walk.at * height - x};
    if (++walk.at == across) walk.at = 0, ++walk.line;
    return found;
  }

  // Multiply one or two tiles of rows by a strip.
  KORCH_INLINE void pass(const Tile (&tiles)[2], bool is_pair, long n, int32_t* to, Strip& next, Pending& before) const {
    const bool is_wide = columns - n > EDGE;
    const char *const first = tiles[0].from, *const second = tiles[1].from, *const strip = b + n / TOGETHER * G::STRIP;
    if (is_pair && is_wide) multiply<2, 2>(first, second, strip, to, next, before);
    else if (is_pair) multiply<2, 1>(first, second, strip, to, next, before);
    else if (is_wide) multiply<1, 2>(first, second, strip, to, next, before);
    else multiply<1, 1>(first, second, strip, to, next, before);
    finish(before, before.end);
    before = Pending{to, {tiles[0], tiles[1]}, 0, height * (1 + is_pair), n};
  }

  // Compute all sums without matrix units.
  __attribute__((noinline)) void run_again() const {
    constexpr auto value = [](char x, bool is_signed) { return is_signed ? static_cast<int8_t>(x) : static_cast<uint8_t>(x); };
    for (long row = 0; row < lines * width; ++row)
      for (long n = 0; n < columns; n += TOGETHER) {
        uint32_t found[TOGETHER] = {};
        for (long s = 0; s < G::STEPS; ++s) {
          const char* const terms = a + row / width * line + row % width * G::STRIDE + G::terms(s);
          const char* const weights = b + n / TOGETHER * G::STRIP + s * G::STEP_BYTES;
          for (long k = 0; k < G::TERM_BYTES; ++k)
            for (long j = 0; j < TOGETHER; ++j)
              found[j] += static_cast<uint32_t>(value(terms[k], A_SIGNED)) *
                          static_cast<uint32_t>(value(weights[k / 4 * G::COLUMN_BYTES + 4 * j + k % 4], B_SIGNED));
        }
        const long end = korch::smaller(columns, n + TOGETHER);
        finish_row<0>(sums, reinterpret_cast<const int32_t*>(found), row, n, end);
      }
  }

  inline void run() const {
    if (!is_ready()) return run_again();
    const long tiles = lines * across, turns = korch::blocks(tiles, 2);
    alignas(64) int32_t found[2][SUMS];
    long turn = 0;
    Pending before;
    begin_bytes(height, G::QUADS);
    // Call a function with each pair of tiles; the last tile may be single.
    const auto for_pairs = [&](auto function) __attribute__((always_inline)) {
      Walk walk;
      for (long tile = 0; tile < tiles; tile += 2) {
        const bool is_pair = tile + 1 < tiles;
        const Tile first = next_of(walk), pair[2] = {first, is_pair ? next_of(walk) : first};
        function(pair, is_pair);
      }
    };
    if constexpr (G::STRIPS_GO_BY) {
      for (long n = 0; n < columns; n += TOGETHER) {
        const long left = n + TOGETHER < columns ? G::STEPS * G::STEP_BYTES / 64 : 0;
        Strip next{b + (n / TOGETHER + 1) * G::STRIP, left, korch::blocks(left, turns * G::STEPS)};
        for_pairs([&](const Tile(&pair)[2], bool is_pair) { pass(pair, is_pair, n, found[turn++ % 2], next, before); });
      }
    } else {
      Strip none{nullptr, 0, 0};
      for_pairs([&](const Tile(&pair)[2], bool is_pair) {
        for (long n = 0; n < columns; n += TOGETHER) pass(pair, is_pair, n, found[turn++ % 2], none, before);
      });
    }
    end();
    finish(before, before.end);
  }
};

template <long ROW, long LINE, long WIDTH, long FOURS, long STRIP_BYTES, bool STRIPS_PASS, long LAST, long INNER,
          long INNER_BYTES, long OUTER, long OUTER_BYTES>
template <class Sums, typename A, typename B>
KORCH_INLINE void ByteTiles<ROW, LINE, WIDTH, FOURS, STRIP_BYTES, STRIPS_PASS, LAST, INNER, INNER_BYTES, OUTER,
                            OUTER_BYTES>::run(const Sums& sums, const A* a, const B* b, long rows, long columns) {
  constexpr bool A_SIGNED = static_cast<A>(-1) < 0, B_SIGNED = static_cast<B>(-1) < 0;
  const long width = WIDTH > 0 ? WIDTH : rows;
  if (rows <= 0 || columns <= 0) return;
  ByteProduct<ByteTiles, Sums, A_SIGNED, B_SIGNED>{
      sums, reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b), LINE, rows / width, width, columns}
      .run();
}

}  // namespace korch_amx
