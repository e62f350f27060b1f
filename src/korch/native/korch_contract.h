// A block of a float32 matrix product with register blocking: R rows times NV vectors of W columns. Operands are tiles
// or memory, of float32, or of narrower elements that are widened when they are read.
#pragma once

#include "korch_half.h"

namespace korch {

// Classes that give sums their initial values and take the results. `begin` returns the initial values of V adjacent sums
// of row r from column n on, and `end` takes their final values. IS_WHOLE says that there is memory for whole vectors in
// each row; IS_NEW says that sums begin with zero, so that they may be computed twice.

// Sums that are added to a tile; rows are ROW elements apart.
template <long ROW, bool IS_ROOMY>
struct Added {
  static constexpr bool IS_WHOLE = IS_ROOMY, IS_NEW = false;
  float* tile;
  template <int V>
  KORCH_INLINE Vec<float, V> begin(long r, long n) const { return load<float, V>(tile + r * ROW + n); }
  template <int V>
  KORCH_INLINE void end(long r, long n, Vec<float, V> sum) const { store<float, V>(tile + r * ROW + n, sum); }
  KORCH_INLINE void fetch(long, long) const {}
};

// Sums that are stored to a tile.
template <long ROW, bool IS_ROOMY>
struct Stored : Added<ROW, IS_ROOMY> {
  static constexpr bool IS_NEW = true;
  template <int V>
  KORCH_INLINE Vec<float, V> begin(long, long) const { return Vec<float, V>{}; }
};

// Sums that are added to a tile whose row r is first multiplied by factors[r * STEP].
template <long ROW, bool IS_ROOMY, long STEP>
struct Rescaled : Added<ROW, IS_ROOMY> {
  const float* factors;
  template <int V>
  KORCH_INLINE Vec<float, V> begin(long r, long n) const {
    return Added<ROW, IS_ROOMY>::template begin<V>(r, n) * splat<float, V>(factors[r * STEP]);
  }
};

struct NoFetch {
  KORCH_INLINE void operator()(long, long) const {}
};

// Sums that are passed to a function (an epilogue), which computes results from them and stores these.
// `Fetch` prefetches the cache line that result (r, n) is stored to.
template <class Finish, class Fetch = NoFetch>
struct Finished {
  static constexpr bool IS_WHOLE = false, IS_NEW = true;
  Finish finish;
  Fetch ahead;
  template <int V>
  KORCH_INLINE Vec<float, V> begin(long, long) const { return Vec<float, V>{}; }
  template <int V, typename X>
  KORCH_INLINE void end(long r, long n, X sum) const { finish.template operator()<V>(sum, r, n); }
  KORCH_INLINE void fetch(long r, long n) const { ahead(r, n); }
};
template <class Finish>
Finished(Finish) -> Finished<Finish>;
template <class Finish, class Fetch>
Finished(Finish, Fetch) -> Finished<Finish, Fetch>;

inline constexpr long LINE = 64;  // bytes that one prefetch brings

// The prefetch distance if b is read contiguously and only once. (1.0 to 1.4 times as fast as prefetching the following
// strip, which is evicted before it is read, for products of 1 to 8 rows.) These prefetches go to the level-2 cache, which
// allows more outstanding lines than the level-1 cache (1.03 to 1.1 times as fast).
inline constexpr long STREAM_BYTES = 16384;

// Up to UNROLLED adjacent terms are fully unrolled if their number is known, so that all offsets are constants (1.05 to
// 1.15 times as fast). More than MOST_UNROLLED multiplications take longer unrolled than in a loop: with 9 terms, 28 rows
// 1.4 times as long, 12 rows 1.14 times as long, 10 rows as long.
inline constexpr long UNROLLED = 16, MOST_UNROLLED = 90;

// The offsets of the rows of a: they are ROW apart; or, if COUNT is not 0, rows come in groups of COUNT rows that are ROW
// apart, and groups begin GROUP apart (a group is a row of an image, whose pixels are the rows here).
template <long ROW, long COUNT = 0, long GROUP = 0>
struct Rows {
  static constexpr long STEP = ROW;
  static constexpr bool HAS_GROUPS = COUNT != 0;
  static KORCH_INLINE long at(long r) {
    if constexpr (!HAS_GROUPS) return r * ROW;
    else return r / COUNT * GROUP + r % COUNT * ROW;
  }
  static KORCH_INLINE bool are_even(long r, long count) {
    if constexpr (!HAS_GROUPS) return true;
    else return r % COUNT + count <= COUNT;
  }
};

// Loops around the loop over adjacent terms: each has N iterations, A elements apart in a and B in b. `Once` is the
// innermost: it says how many adjacent terms there are, or 0 if that is known at run time only.
template <long N = 0>
struct Once {
  static constexpr long TERMS = N;
  template <class F>
  static KORCH_INLINE void run(long a, long b, const F& turn) { turn(a, b); }
};
template <long N, long A, long B, class Inner>
struct Turns {
  static constexpr long TERMS = Inner::TERMS;
  template <class F>
  static KORCH_INLINE void run(long a, long b, const F& turn) {
    for (long i = 0; i < N; ++i, a += A, b += B) Inner::run(a, b, turn);
  }
};

// Initialize the sums of COUNT rows times N vectors of V columns. If IS_EDGE, N is 1 and only `count` columns exist.
template <bool IS_EDGE, int V, int COUNT, int N, class Sums>
KORCH_INLINE void begin_block(const Sums& sums, Vec<float, V> (&sum)[COUNT][N], long r0, long n0, long count) {
#pragma GCC unroll 32
  for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if constexpr (IS_EDGE) {
        alignas(64) float x[V] = {};
        for (long j = 0; j < count; ++j) x[j] = sums.template begin<1>(r0 + r, n0 + j);
        sum[r][v] = load<float, V>(x);
      } else {
        sum[r][v] = sums.template begin<V>(r0 + r, n0 + v * V);
      }
    }
}

// Finish the sums. In two cases they go through memory, so that the code for one of them is compiled only once: at an
// edge, and, if IS_SHORT, for all rows. This halves the compile time if there are variants for many numbers of rows, and
// does not make the kernel slower.
template <bool IS_EDGE, int V, bool IS_SHORT = false, int COUNT, int N, class Sums>
KORCH_INLINE void end_block(const Sums& sums, const Vec<float, V> (&sum)[COUNT][N], long r0, long n0, long count) {
  if constexpr (IS_EDGE) {
    alignas(64) float x[COUNT * V];
#pragma GCC unroll 32
    for (int r = 0; r < COUNT; ++r) store<float, V>(x + r * V, sum[r][0]);
    for (long r = 0; r < COUNT; ++r)
      for (long j = 0; j < count; ++j) sums.template end<1>(r0 + r, n0 + j, x[r * V + j]);
  } else if constexpr (IS_SHORT && COUNT > 1) {
    alignas(64) float x[COUNT * N * V];
#pragma GCC unroll 32
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) store<float, V>(x + (r * N + v) * V, sum[r][v]);
#pragma GCC unroll 1
    for (long r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sums.template end<V>(r0 + r, n0 + v * V, load<float, V>(x + (r * N + v) * V));
  } else {
#pragma GCC unroll 32
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sums.template end<V>(r0 + r, n0 + v * V, sum[r][v]);
  }
}

// Row r of a begins at a[ROWS::at(r)]. Adjacent terms have the strides A_TERM and B_TERM; LOOPS are the loops around
// them. Strip s of b has NV vectors; vector v of its term k is at b[s * STRIP + v * VECTOR + k * B_TERM], with stride
// COLUMN between columns. Nothing beyond `columns` is read or written, except in panels (IS_PANEL), which have whole
// vectors. While a block of rows is computed, EACH cache lines per term are prefetched: of the following strip, or
// STREAM_BYTES ahead (IS_STREAM). With the first strip, AHEAD lines per term of the row that is FURTHER rows after the
// block's first row are prefetched, too, if rows are contiguous. TAILS lists the numbers of rows below R that may remain.
// `after` is the strip that will be read after the last one, or null.
template <int W, int R, int NV, class ROWS, class LOOPS, long A_TERM, long B_TERM, long COLUMN, long VECTOR, long STRIP,
          bool IS_PANEL, int EACH, bool IS_STREAM, int AHEAD, long FURTHER, int... TAILS>
struct Contraction {
  static constexpr long COLUMNS = NV * W;

  // Memory to prefetch: the address of the first term's lines, and the stride between terms in bytes.
  struct Lines {
    const void* from;
    long step;
  };

  // Compute COUNT rows times N vectors; if IS_EDGE, only the first `count` columns exist. Meanwhile, FETCHED lines per
  // term are prefetched.
  template <int COUNT, int N, int V, bool IS_EDGE, int FETCHED, bool IS_EVEN, class Sums, typename A, typename B>
  static __attribute__((noinline)) void tile(const Sums& given, const A* a, const B* b, Lines lines, const A* further, long r0, long n0, long terms, long count) {
    const Sums sums = given;  // a local copy, which stores can't alias
    if constexpr (!IS_EDGE) {
#pragma GCC unroll 32
      for (int r = 0; r < COUNT; ++r)
        for (int n = 0; n < N * V; n += 16) sums.fetch(r0 + r, n0 + n);
    }
    Vec<float, V> sum[COUNT][N];
    begin_block<IS_EDGE, V>(sums, sum, r0, n0, count);
    const A* first[IS_EVEN ? 1 : COUNT];  // rows of a
#pragma GCC unroll 32
    for (int r = 0; r < (IS_EVEN ? 1 : COUNT); ++r) first[r] = a + ROWS::at(r0 + r);
    const char* ahead = static_cast<const char*>(lines.from);
    const long neighbours = LOOPS::TERMS ? LOOPS::TERMS : terms;
    LOOPS::run(0, 0, [&](long from_a, long from_b) __attribute__((always_inline)) {
      const auto add = [&](long k) __attribute__((always_inline)) {
        Vec<float, V> w[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) {
          const B* const at = b + from_b + v * VECTOR + k * B_TERM;
          if constexpr (IS_EDGE && !IS_PANEL) w[v] = load_some<float, V>(at, count);
          else if constexpr (sizeof(B) == 1 && COLUMN == 1) w[v] = cast<float, B, V>(load<B, V>(at));
          else if constexpr (sizeof(B) == 1) w[v] = cast<float, B, V>(strided<B, V>(at, COLUMN));
          else if constexpr (COLUMN == 1) w[v] = load<float, V>(at);
          else w[v] = strided<float, V>(at, COLUMN);
        }
#pragma GCC unroll 8
        for (int q = 0; q < FETCHED; ++q) __builtin_prefetch(ahead + k * lines.step + q * LINE, 0, IS_STREAM ? 2 : 3);
#pragma GCC unroll 4
        for (int q = 0; q < AHEAD; ++q)
          __builtin_prefetch(reinterpret_cast<const char*>(further + from_a) + (k * AHEAD + q) * LINE);
#pragma GCC unroll 32
        for (int r = 0; r < COUNT; ++r) {
          const A* const at = IS_EVEN ? first[0] + r * ROWS::STEP : first[IS_EVEN ? 0 : r];
          const Vec<float, V> x = splat<float, V>(static_cast<float>(at[from_a + k * A_TERM]));
#pragma GCC unroll 8
          for (int v = 0; v < N; ++v) sum[r][v] += x * w[v];
        }
      };
      if constexpr (LOOPS::TERMS > 0 && LOOPS::TERMS <= UNROLLED && LOOPS::TERMS * COUNT * N <= MOST_UNROLLED) {
#pragma GCC unroll 16
        for (long k = 0; k < LOOPS::TERMS; ++k) add(k);
      } else {
#pragma GCC unroll 4
        for (long k = 0; k < neighbours; ++k) add(k);
      }
      ahead += neighbours * lines.step;
    });
    end_block<IS_EDGE, V, (sizeof...(TAILS) > 1)>(sums, sum, r0, n0, count);
  }

  // If the rows belong to two groups, each row has its own address.
  template <int COUNT, int N, int V, bool IS_EDGE, int FETCHED, class Sums, typename A, typename B>
  static KORCH_INLINE void some(const Sums& sums, const A* a, const B* b, Lines lines, const A* further, long r, long n, long terms, long count) {
    if (ROWS::are_even(r, COUNT)) tile<COUNT, N, V, IS_EDGE, FETCHED, true>(sums, a, b, lines, further, r, n, terms, count);
    else tile<COUNT, N, V, IS_EDGE, FETCHED, false>(sums, a, b, lines, further, r, n, terms, count);
  }

  // Compute all rows of N vectors. Meanwhile, the following strip is prefetched. The remaining blocks of rows prefetch
  // the rows of a that follow, if these are contiguous.
  template <int N, int V, bool IS_EDGE, class Sums, typename A, typename B>
  static KORCH_INLINE void rows(const Sums& sums, const A* a, const B* b, const B* next, long n, long rows, long terms, long count) {
    constexpr long STEP = B_TERM * sizeof(B), ROW = COLUMNS * sizeof(B);
    const Lines none{b, 0}, stream{reinterpret_cast<const char*>(b) + STREAM_BYTES, STEP};
    const bool is_dense = A_TERM == 1 && ROWS::STEP == terms && R * sizeof(A) <= LINE;
    long line = next ? 0 : ROW, r = 0;
    // With few blocks of rows, EACH lines per block would not prefetch the whole following strip, so the first block
    // prefetches all of it (1.3 to 1.4 times as fast).
    constexpr int ALL = blocks(ROW, LINE);
    if constexpr (sizeof...(TAILS) > 1 && N == NV && !IS_STREAM && EACH > 0 && EACH < ALL)
      if (next && rows >= R && rows / R * EACH < ALL) {
        some<R, N, V, IS_EDGE, ALL>(sums, a, b, Lines{next, STEP}, a + ROWS::at(n == 0 ? FURTHER : 0), 0, n, terms, count);
        r = R;
        line = ROW;
      }
    for (; r + R <= rows; r += R, line += EACH * LINE) {
      Lines lines = none;
      if (IS_STREAM) lines = stream;
      else if (line < ROW) lines = {reinterpret_cast<const char*>(next) + line, STEP};
      else if (is_dense) lines = {a + ROWS::at(r + R), LINE};
      some<R, N, V, IS_EDGE, EACH>(sums, a, b, lines, a + ROWS::at(n == 0 ? r + FURTHER : r), r, n, terms, count);
    }
    [[maybe_unused]] const Lines last = IS_STREAM ? stream : none;
    (void)((r + TAILS == rows && (some<TAILS, N, V, IS_EDGE, EACH>(sums, a, b, last, a + ROWS::at(r), r, n, terms, count), true)) || ...);
  }

  template <class Sums, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const A* a, const B* b, long count, long columns, long terms,
                               const B* after = nullptr) {
    if (Sums::IS_WHOLE) columns = (columns + W - 1) / W * W;
    const B* const none = nullptr;
    // If the number of columns is known, these comparisons remove unneeded code: compilers spend most of their time on
    // blocks of single columns.
    const long whole = columns / COLUMNS * COLUMNS, vectors = columns / W * W;
    long n = 0;
    for (; n < whole; n += COLUMNS) {
      const bool is_last = n + COLUMNS >= columns;
      rows<NV, W, false>(sums, a, b + n / COLUMNS * STRIP, is_last ? after : b + (n / COLUMNS + 1) * STRIP, n, count, terms, 0);
    }
    if (whole == columns) return;
    n = whole;
    b += n / COLUMNS * STRIP;
    if constexpr (NV > 1)
      if (whole != vectors)
        for (; n < vectors; n += W, b += VECTOR) rows<1, W, false>(sums, a, b, none, n, count, terms, 0);
    if (vectors == columns) return;
    if constexpr (COLUMN == 1) rows<1, W, true>(sums, a, b, none, n, count, terms, columns - n);
    else
      for (; n < columns; ++n, b += COLUMN) rows<1, 1, false>(sums, a, b, none, n, count, terms, 0);
  }
};

}  // namespace korch
