// A depthwise convolution of floats: each vector lane is a channel, and the image is read in place, without a copy.
// A "place" is an output pixel of a row.
#pragma once

#include "korch_contract.h"

namespace korch {

// The prefetch distance in places, in memory order. Software prefetches are needed because a row may end at a page
// boundary, where hardware prefetchers stop. A distance of 64 is 4 KB for vectors of 16 floats, so that prefetches would
// use the cache sets of the elements being read; 48 is about 8 % faster on an AMD EPYC of family 25.
inline constexpr long PLACES_AHEAD = 48;

inline constexpr long INSIDE = -1, ANYWHERE = -2;

// A row of OUT places, R at a time. Windows have REACH columns and begin S apart; the first one begins BEFORE columns ahead
// of an image row of WIDTH columns. `tile` is called for COUNT places: from AT on if AT >= 0, which is known at compile
// time; else from x on, with windows INSIDE of the row, or ANYWHERE. Usually only the first and the last tile read columns
// outside of the row.
template <int R, long OUT, long S, long REACH, long BEFORE, long WIDTH>
struct RowTiles {
  static constexpr long TAIL = OUT % R, LAST_TILE = TAIL == 0 ? R : TAIL, FINAL = OUT - LAST_TILE;
  static constexpr long BEGIN = (BEFORE + S - 1) / S;  // the first place whose window begins inside of the row
  static constexpr long END = WIDTH + BEFORE < REACH ? 0 : (WIDTH + BEFORE - REACH) / S + 1;

  // The tile that begins at place x.
  template <class Tile>
  static KORCH_INLINE void at(long x, const Tile& tile) {
    constexpr bool IS_EVEN = BEGIN <= R && FINAL <= END, IS_LAST_INSIDE = OUT <= END && (FINAL > 0 || BEGIN == 0);
    if constexpr (IS_EVEN && BEGIN > 0 && FINAL > 0)
      if (x == 0) return tile.template operator()<R, 0>(0);
    if (x < FINAL && (IS_EVEN || (x >= BEGIN && x + R <= END))) return tile.template operator()<R, INSIDE>(x);
    if constexpr (!IS_EVEN)
      if (x < FINAL) return tile.template operator()<R, ANYWHERE>(x);
    tile.template operator()<LAST_TILE, IS_EVEN ? (IS_LAST_INSIDE ? INSIDE : FINAL) : ANYWHERE>(FINAL);
  }
  template <class Tile>
  static KORCH_INLINE void run(const Tile& tile) {
    for (long x = 0; x < OUT; x += R) at(x, tile);
  }
};

// A row of OUT places, R at a time. Column kx of the window of place x is element x * S + kx * D - BEFORE of an image row
// of elements with stride UNIT; the last window ends OVER elements beyond the row. `a` points to element -BEFORE of the
// first row. Elements outside of a row count as zero. Weights come in panels of W channels, PANEL apart, in which the
// columns of a window are adjacent. If FETCHES, two things are prefetched: the places that results are soon stored to, and
// the elements that are soon read of the last S rows of a window (rows are ROW apart, the last one is LAST after the first).
// IS_PARTIAL says whether the channels may end inside of a vector.
template <int W, int R, long OUT, int KW, long S, long D, long UNIT, long BEFORE, long OVER, long PANEL, long ROW, long LAST,
          bool FETCHES, bool IS_PARTIAL>
struct WindowContraction {
  typedef Vec<float, W> V;
  static constexpr long REACH = (KW - 1) * D + 1;
  static constexpr long WIDTH = (OUT - 1) * S + REACH - BEFORE - OVER;  // the elements of an image row
  typedef RowTiles<R, OUT, S, REACH, BEFORE, WIDTH> Tiles;

  // COUNT places from AT on (see `RowTiles`).
  // `rows` calls a function for each row of the window, with its offsets in a and in b.
  template <int COUNT, long AT, bool IS_EDGE, class Sums, class Rows, typename A, typename B>
  static __attribute__((noinline)) void tile(const Sums& given, const Rows& window, const A* a, const B* b, long x, long n, long count) {
    const Sums sums = given;  // a local copy, which stores can't alias
    const Rows rows = window;
    if constexpr (AT >= 0) x = AT;
    const A* const first = a + x * (S * UNIT);
    const long left = x * S - BEFORE;
    if constexpr (FETCHES) {
      constexpr long STEP = W < 16 ? 16 / W : 1;  // places per cache line
#pragma GCC unroll 16
      for (long r = 0; r < COUNT; r += STEP) sums.fetch(x + PLACES_AHEAD + r, n);
#pragma GCC unroll 32
      for (long r = 0; r < COUNT * S; r += STEP)
        for (long y = LAST; y >= 0 && y > LAST - S * ROW; y -= ROW) __builtin_prefetch(first + y + (PLACES_AHEAD + r) * UNIT);
    }
    const auto read = [&](const A* at) __attribute__((always_inline)) {
      if constexpr (IS_EDGE) return load_some<float, W>(at, count);
      else return load<float, W>(at);
    };
    V sum[COUNT][1];
    begin_block<IS_EDGE, W>(sums, sum, x, n, count);
    rows([&](long from_a, long from_b) __attribute__((always_inline)) {
      const A* const line = first + from_a;
      const B* const w = b + from_b;
      // If there are enough registers, each element is loaded once for all columns of the window.
      if constexpr (AT != ANYWHERE && COUNT + KW + 1 < (W == 16 ? 32 : 16)) {
        V v[KW];
#pragma GCC unroll 16
        for (int k = 0; k < KW; ++k) v[k] = load<float, W>(w + k * W);
#pragma GCC unroll 64
        for (long p = 0; p < (COUNT - 1) * S + REACH; ++p) {
          if (is_outside<AT>(p)) continue;
          V x = read(line + p * UNIT);
          KORCH_KEEP(x);
#pragma GCC unroll 16
          for (int k = 0; k < KW; ++k) {
            const long q = p - k * D;
            if (q >= 0 && q % S == 0 && q / S < COUNT) sum[q / S][0] += v[k] * x;
          }
        }
      } else {
#pragma GCC unroll 8
        for (int k = 0; k < KW; ++k) {
          const V v = load<float, W>(w + k * W);
#pragma GCC unroll 16
          for (long r = 0; r < COUNT; ++r) {
            const long p = r * S + k * D, column = (AT >= 0 ? AT * S - BEFORE : left) + p;
            if (AT != INSIDE && (column < 0 || column >= WIDTH)) continue;
            sum[r][0] += v * read(line + p * UNIT);
          }
        }
      }
    });
    end_block<IS_EDGE, W>(sums, sum, x, n, count);
  }

  // Whether column p of the windows of COUNT places is outside of the row; not for places ANYWHERE.
  template <long AT>
  static KORCH_INLINE constexpr bool is_outside(long p) {
    return AT >= 0 && (AT * S - BEFORE + p < 0 || AT * S - BEFORE + p >= WIDTH);
  }

  // A row of places for one vector of channels.
  template <bool IS_EDGE, class Sums, class Rows, typename A, typename B>
  static KORCH_INLINE void row(const Sums& sums, const Rows& rows, const A* a, const B* b, long n, long count) {
    Tiles::run([&]<int COUNT, long AT>(long x) __attribute__((always_inline)) {
      tile<COUNT, AT, IS_EDGE>(sums, rows, a, b, x, n, count);
    });
  }

  template <class Sums, class Rows, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const Rows& rows, const A* a, const B* b, long columns) {
    long n = 0;
    for (; n + W <= columns; n += W, b += PANEL) row<false>(sums, rows, a + n, b, n, W);
    if constexpr (IS_PARTIAL)
      if (n < columns) row<true>(sums, rows, a + n, b, n, columns - n);
  }
};

}  // namespace korch
