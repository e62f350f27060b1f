// Matrix products on matrix units (Intel AMX), which multiply bfloat16 numbers.
//
// A float32 has 24 significant bits, a bfloat16 has 8, so x = x0 + x1 + x2 exactly, each the nearest
// bfloat16 to the remainder after the ones before. Of the nine products of components, the six largest are summed
// in float32: x0 y0, x0 y1, x1 y0, x1 y1, x0 y2 and x2 y0. The others are at most 2^-23 of |x y| together, usually
// less than the rounding error of one float32 product. As the units round a sum only six times per 32 terms, the
// result is more accurate than a chain of float32 multiply-adds. Components, products and sums below 2^-126 are zero.
// Numbers of narrower types have fewer components: bfloat16 and bytes have one, float16 have two. All products of
// operands with up to two components are summed.
// Numbers that are infinite, or round to infinity, have no components: the results are then not finite, and the
// vector units compute them again.
//
// A step is 32 terms. In a step, 16 rows are one tile per component, [16 rows][16 pairs of terms]; 16 columns
// are also one tile per component, [16 pairs of terms][16 columns].
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__linux__) && defined(__x86_64__) && !defined(KORCH_AMX_IN_SOFTWARE)
#define KORCH_AMX_IN_HARDWARE
#include "korch_units.h"
#endif

#include "korch_half.h"

namespace korch_amx {

inline constexpr long TERMS = 32, EDGE = 16;  // terms of a step; rows or columns of a tile
inline constexpr long TOGETHER = 2 * EDGE, SUMS = TOGETHER * TOGETHER;
inline constexpr long TILE = 512;             // numbers in a tile of components
inline constexpr int MOST_COMPONENTS = 3;
template <int P>
inline constexpr long STEP_OF = 2 * P * TILE;  // numbers of two tiles of rows, or of columns, of P components in a step
inline constexpr long STEP = STEP_OF<MOST_COMPONENTS>;

typedef korch::Vec<float, 16> Floats;
typedef korch::Vec<uint32_t, 16> Bits;

#if !defined(KORCH_AMX_IN_HARDWARE)
// An emulation of the units' arithmetic, for tests on CPUs without them.
inline thread_local float tiles[8][EDGE][EDGE];

inline float component_of(const float* row, long i) {
  uint16_t components[2];
  memcpy(components, row + i / 2, 4);
  const uint32_t bits = static_cast<uint32_t>(components[i % 2]) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline void tile_load(int n, const void* from, long stride) {
  for (long r = 0; r < EDGE; ++r) memcpy(tiles[n][r], static_cast<const char*>(from) + r * stride, 64);
}
inline void tile_store(int n, void* to) {
  for (long r = 0; r < EDGE; ++r) memcpy(static_cast<char*>(to) + r * 128, tiles[n][r], sizeof(tiles[n][r]));
}
inline void tile_fill(int n, const float* from) {
  for (long r = 0; r < EDGE; ++r) memcpy(tiles[n][r], from + r * 2 * EDGE, sizeof(tiles[n][r]));
}
inline void tile_zero(int n) { memset(tiles[n], 0, sizeof(tiles[n])); }
inline void tile_dot(int c, int a, int b) {
  for (long m = 0; m < EDGE; ++m)
    for (long n = 0; n < EDGE; ++n) {
      float even = 0, odd = 0;
      for (long k = 0; k < EDGE; ++k) {
        even += component_of(tiles[a][m], 2 * k) * component_of(tiles[b][k], 2 * n);
        odd += component_of(tiles[a][m], 2 * k + 1) * component_of(tiles[b][k], 2 * n + 1);
      }
      tiles[c][m][n] += even + odd;
    }
}
#define KORCH_TILE_LOAD(n, from, stride) tile_load(n, from, stride)
#define KORCH_TILE_STORE(n, to) tile_store(n, to)
#define KORCH_TILE_FILL(n, from) tile_fill(n, from)
#define KORCH_TILE_ZERO(n) tile_zero(n)
#define KORCH_TILE_DOT(c, a, b) tile_dot(c, a, b)
inline bool is_ready() { return true; }
KORCH_INLINE void begin() {}
KORCH_INLINE void end() {}
KORCH_INLINE void stay_awake(Floats&) {}
#else
#define KORCH_TILE_LOAD(n, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #n : : "r"(from), "r"(stride) : "memory")
#define KORCH_TILE_STORE(n, to) asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" : : "r"(to), "r"(128L) : "memory")
#define KORCH_TILE_FILL(n, from) asm volatile("tileloadd (%0,%1,1), %%tmm" #n : : "r"(from), "r"(128L) : "memory")
#define KORCH_TILE_ZERO(n) asm volatile("tilezero %%tmm" #n : :)
#define KORCH_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

inline bool is_ready() { return korch::may_use_matrix_units(); }

struct alignas(64) Configuration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Called before a thread's first product (begin) and after its last (end).
KORCH_INLINE void begin() {
  const Configuration all;
  asm volatile("ldtilecfg %0" : : "m"(all));
}
KORCH_INLINE void end() { asm volatile("tilerelease" : :); }

// Keep the vector units busy. After about 0.7 us without work they power down, and the next tile store
// waits a quarter of a microsecond for them (measured on Granite Rapids).
KORCH_INLINE void stay_awake(Floats& zero) { asm volatile("vfmadd231ps %0, %0, %0" : "+v"(zero)); }
#endif

// A vector's next component as float32: rounded to nearest; the last component is truncated, which is exact.
KORCH_INLINE Bits upper(Floats x, bool is_last) {
  constexpr uint32_t HALF = 0x8000, MOST = 0xFFFF0000;
  return ((Bits)x + (is_last ? 0 : HALF)) & MOST;
}

// Write the P components of two vectors, joined to lines of 32 numbers; components are `tile` numbers apart.
template <int P, class Join>
KORCH_INLINE void split(Floats low, Floats high, uint16_t* to, long tile, Join join) {
#pragma GCC unroll 3
  for (int i = 0; i < P; ++i) {
    const Bits a = upper(low, i + 1 == P), b = upper(high, i + 1 == P);
    const Bits both = join(a, b);
    memcpy(to + i * tile, &both, sizeof(both));
    low -= (Floats)a;
    high -= (Floats)b;
  }
}

// Each lane of the result is a pair of terms, one from each vector.
template <int P = MOST_COMPONENTS>
KORCH_INLINE void split(Floats low, Floats high, uint16_t* to, long tile) {
  split<P>(low, high, to, tile, [](Bits a, Bits b) __attribute__((always_inline)) { return (a >> 16) | b; });
}

// 32 adjacent terms, each even one paired with the next.
template <int P, int... I>
KORCH_INLINE void split_line(Floats low, Floats high, uint16_t* to, long tile, korch::Lanes<I...>) {
  typedef korch::Vec<uint16_t, 32> Halves;
  split<P>(low, high, to, tile,
        [](Bits a, Bits b) __attribute__((always_inline)) {
          return (Bits)__builtin_shufflevector((Halves)a, (Halves)b, (2 * I + 1)...);
        });
}

// Splits a block of 32 rows with adjacent terms (lines are rows), or a strip of 32 columns (lines are terms), into
// components [steps][P components][2 tiles][TILE]. Some parts at a time are split while products are computed,
// because the vector units have little to do then. A step has 16 parts: two rows, or a pair of terms, each.
template <bool IS_ROWS, class From, int P = MOST_COMPONENTS>
struct Unsplit {
  From from;   // the numbers: value<W>(line, at) reads, fetch(line, at) prefetches
  long first;  // row or column
  long count;  // how many of the 32 rows or columns exist; the others are zero
  long terms;
  uint16_t* to;
};
template <bool IS_ROWS, class From, int P = MOST_COMPONENTS>
struct Splitter {
  Unsplit<IS_ROWS, From, P> own;
  long part, last, each;  // the next part, the end, and how many to split during four products of tiles
};
inline constexpr unsigned long PARTS = 16;

// 16 adjacent numbers of a line, of which only some exist.
template <class From>
__attribute__((noinline)) void copy_some(const From& from, long line, long at, long count, float* edge) {
  for (long j = 0; j < count; ++j) edge[j] = from.template value<1>(line, at + j);
}
template <class From>
KORCH_INLINE Floats some(const From& from, long line, long at, long count) {
  if (count >= EDGE) return from.template value<16>(line, at);
  alignas(64) float edge[EDGE] = {};
  copy_some(from, line, at, count, edge);
  return korch::load<float, 16>(edge);
}

template <bool IS_ROWS, class From, int P>
KORCH_INLINE void split_part(const Unsplit<IS_ROWS, From, P>& s, unsigned long part) {
  const long k = part / PARTS * TERMS, i = part % PARTS;
  uint16_t* const to = s.to + part / PARTS * STEP_OF<P>;
  if constexpr (IS_ROWS) {
#pragma GCC unroll 2
    for (long t = 0; t < 2; ++t) {
      const long row = s.first + i + t * EDGE;
      Floats low = {}, high = {};
      if (i + t * EDGE < s.count) {
        s.from.fetch(row, k + 2 * TERMS);
        s.from.fetch(row, k + 2 * TERMS + EDGE);
        low = some(s.from, row, k, s.terms - k);
        high = some(s.from, row, k + EDGE, s.terms - k - EDGE);
      }
      split_line<P>(low, high, to + t * TILE + i * TERMS, 2 * TILE, korch::LanesTo<TERMS>::type());
    }
  } else {
    // Terms in order, so that prefetches follow sequential streams.
    const long term = k + 2 * i;
#pragma GCC unroll 2
    for (long t = 0; t < 2; ++t) {
      const long column = s.first + t * EDGE, left = s.count - t * EDGE;
      s.from.fetch(term + 4 * TERMS, column);
      s.from.fetch(term + 4 * TERMS + 1, column);
      Floats x = {}, y = {};
      if (term < s.terms) x = some(s.from, term, column, left);
      if (term + 1 < s.terms) y = some(s.from, term + 1, column, left);
      split<P>(x, y, to + t * TILE + i * TERMS, 2 * TILE);
    }
  }
}

// The lines of a step of terms: part i joins lines `low(i)` and `high(i)`. The lines AHEAD lines later are
// prefetched meanwhile.
struct Neighbours {
  long first;
  static constexpr long AHEAD = 4 * TERMS;
  KORCH_INLINE long low(long i) const { return first + 2 * i; }
  KORCH_INLINE long high(long i) const { return first + 2 * i + 1; }
};

// Split parts of strips of columns that are whole, with whole steps of terms, so that no bounds are checked. Stores do
// not alias what is read, so destinations are `__restrict`; a copy of the operand instead would stall. Operands whose
// lines are in another order return the lines of each step (`lines`), and the numbers to read there (`source`).
template <class From, int P>
KORCH_INLINE void split_whole(const Unsplit<false, From, P>& s, long begin, long end) {
  constexpr long EACH = PARTS;
  const long first = s.first;
  // Call a function with the lines of a step, the number of a part in the step, and the part's destination.
  const auto for_parts = [&s, to = s.to, begin, end](auto function) __attribute__((always_inline)) {
    for (long part = begin; part < end;) {
      const long step = part / EACH, stop = korch::smaller(end, (step + 1) * EACH);
      uint16_t* __restrict at = to + step * STEP_OF<P> + (part - step * EACH) * TERMS;
      const auto run = [&](auto lines) __attribute__((always_inline)) {
        for (; part < stop; ++part, at += TERMS) function(lines, part - step * EACH, at);
      };
      if constexpr (requires { s.from.lines(step); }) run(s.from.lines(step));
      else run(Neighbours{step * TERMS});
    }
  };
  if constexpr (P == 1 && requires { s.from.pairs_of(begin, first); }) {
    auto low = s.from.pairs_of(begin, first), high = s.from.pairs_of(begin, first + EDGE);
    for_parts([&](auto, long, uint16_t* __restrict to) __attribute__((always_inline)) {
      const Bits a = low(), b = high();
      memcpy(to, &a, sizeof(Bits));
      memcpy(to + TILE, &b, sizeof(Bits));
    });
  } else {
    const auto from = [&] {
      if constexpr (requires { s.from.lines(begin); }) return s.from.source();
      else return s.from;
    }();
    for_parts([&](auto lines, long i, uint16_t* __restrict to) __attribute__((always_inline)) {
      const long low = lines.low(i), high = lines.high(i);
#pragma GCC unroll 2
      for (long t = 0; t < 2; ++t) {
        const long column = first + t * EDGE;
        from.fetch(low + lines.AHEAD, column);
        from.fetch(high + lines.AHEAD, column);
        split<P>(from.template value<16>(low, column), from.template value<16>(high, column), to + t * TILE, 2 * TILE);
      }
    });
  }
}

// The same for rows.
template <class From, int P>
KORCH_INLINE void split_whole(const Unsplit<true, From, P>& s, long begin, long end) {
  const From from = s.from;
  const long first = s.first;
  uint16_t* __restrict const to = s.to;
  for (unsigned long part = begin; part < static_cast<unsigned long>(end); ++part) {
    const long k = part / PARTS * TERMS, i = part % PARTS;
    uint16_t* __restrict const at = to + part / PARTS * STEP_OF<P> + i * TERMS;
#pragma GCC unroll 2
    for (long t = 0; t < 2; ++t) {
      const long row = first + i + t * EDGE;
      from.fetch(row, k + 2 * TERMS);
      from.fetch(row, k + 2 * TERMS + EDGE);
      const Floats low = from.template value<16>(row, k), high = from.template value<16>(row, k + EDGE);
      split_line<P>(low, high, at + t * TILE, 2 * TILE, korch::LanesTo<TERMS>::type());
    }
  }
}

// Split parts in which some rows, columns or terms do not exist.
template <bool IS_ROWS, class From, int P>
__attribute__((noinline)) void split_ragged(const Unsplit<IS_ROWS, From, P>& s, long begin, long end) {
  const Unsplit<IS_ROWS, From, P> own = s;  // a local copy, which stores can't alias
  for (long part = begin; part < end; ++part) split_part(own, part);
}

// Split the next `count` parts.
template <bool IS_ROWS, class From, int P>
KORCH_INLINE void split_some(Splitter<IS_ROWS, From, P>& s, long count) {
  const long begin = s.part, end = korch::smaller(begin + count, s.last);
  if (begin >= end) return;
  s.part = end;
  if (s.own.count == TOGETHER && s.own.terms % TERMS == 0) split_whole(s.own, begin, end);
  else split_ragged(s.own, begin, end);
}

template <bool IS_ROWS, int P = MOST_COMPONENTS, class From>
KORCH_INLINE Splitter<IS_ROWS, From, P> splitter(const From& from, long first, long count, long terms, uint16_t* to) {
  return {{from, first, count, terms, to}, 0, korch::blocks(terms, TERMS) * static_cast<long>(PARTS), 0};
}

// The products of tiles in a step, in order: each is of a component of rows and one of columns. Consecutive products
// share one of the two if possible.
struct Pairs {
  int count, rows[MOST_COMPONENTS * MOST_COMPONENTS], columns[MOST_COMPONENTS * MOST_COMPONENTS];
};
template <int A, int B>
constexpr Pairs pairs_of() {
  Pairs found{};
  const auto add = [&](int i, int j) { found.rows[found.count] = i, found.columns[found.count++] = j; };
  int last = 0;  // the last column of the previous row; the order is reversed below
  for (int i = A - 1; i >= 0; --i) {
    const int most = B < MOST_COMPONENTS - i ? B : MOST_COMPONENTS - i, first = last;
    add(i, first);
    for (int j = 0; j < most; ++j)
      if (j != first) add(i, last = j);
  }
  Pairs turned{found.count, {}, {}};
  for (int t = 0; t < found.count; ++t) {
    turned.rows[t] = found.rows[found.count - 1 - t];
    turned.columns[t] = found.columns[found.count - 1 - t];
  }
  return turned;
}
template <int A, int B>
inline constexpr Pairs PAIRS = pairs_of<A, B>();

// Groups of four products of tiles in a step (a block of rows by a strip of columns): one for each pair of components.
inline constexpr long TURNS = PAIRS<MOST_COMPONENTS, MOST_COMPONENTS>.count;

// The addresses of the components of 16 R rows of a product, in a block that a Splitter has made.
template <int P = MOST_COMPONENTS>
struct Block {
  const uint16_t* from;
  static constexpr long STRIDE = 64;  // bytes between rows of a tile
  static constexpr int COMPONENTS = P;
  KORCH_INLINE const uint16_t* tile(long step, long component, long tile) const {
    return from + step * STEP_OF<P> + (2 * component + tile) * TILE;
  }
};

// Four products of tiles; a tile for the next four is loaded as soon as the tile that it replaces has been used twice.
template <int R, int A, int B, int T, class Rows, class Beside>
KORCH_INLINE void multiply_pair(const Rows& rows, const uint16_t* b, const uint16_t* b_after, long step, long after, Beside& beside) {
  constexpr Pairs ALL = PAIRS<A, B>;
  constexpr bool ENDS = T + 1 == ALL.count;
  constexpr int NEXT = ENDS ? 0 : T + 1, I = ALL.rows[NEXT], J = ALL.columns[NEXT];
  constexpr bool NEW_ROWS = ENDS || I != ALL.rows[T], NEW_COLUMNS = ENDS || J != ALL.columns[T];
  const uint16_t* const columns = (ENDS ? b_after : b) + J * 2 * TILE;
  if constexpr (ENDS) step = after;
  beside();
  KORCH_TILE_DOT(0, 4, 6);
  if constexpr (NEW_ROWS) {
    KORCH_TILE_DOT(1, 4, 7);
    KORCH_TILE_LOAD(4, rows.tile(step, I, 0), Rows::STRIDE);
    if constexpr (R == 2) KORCH_TILE_DOT(2, 5, 6);
    if constexpr (NEW_COLUMNS) KORCH_TILE_LOAD(6, columns, 64L);
    if constexpr (R == 2) {
      KORCH_TILE_DOT(3, 5, 7);
      KORCH_TILE_LOAD(5, rows.tile(step, I, 1), Rows::STRIDE);
    }
  } else {
    if constexpr (R == 2) KORCH_TILE_DOT(2, 5, 6);
    KORCH_TILE_LOAD(6, columns, 64L);
    KORCH_TILE_DOT(1, 4, 7);
    if constexpr (R == 2) KORCH_TILE_DOT(3, 5, 7);
  }
  if constexpr (NEW_COLUMNS) KORCH_TILE_LOAD(7, columns + TILE, 64L);
}

// Multiply 16 R rows by 32 columns of B components, and add the products to sums[16 R][32] (if `adds`) or store them
// there. `beside` is called once per pair of components and step, so that vector units can do other work meanwhile.
template <int R, int B = MOST_COMPONENTS, class Rows, class Beside>
KORCH_INLINE void multiply_tiles(const Rows rows, const uint16_t* b, long steps, float* sums, bool adds, Beside beside) {
  constexpr int A = Rows::COMPONENTS;
  if (adds) {
    KORCH_TILE_FILL(0, sums);
    KORCH_TILE_FILL(1, sums + EDGE);
    if constexpr (R == 2) {
      KORCH_TILE_FILL(2, sums + EDGE * 2 * EDGE);
      KORCH_TILE_FILL(3, sums + EDGE * 2 * EDGE + EDGE);
    }
  } else {
    KORCH_TILE_ZERO(0);
    KORCH_TILE_ZERO(1);
    KORCH_TILE_ZERO(2);
    KORCH_TILE_ZERO(3);
  }
  constexpr long FIRST = PAIRS<A, B>.columns[0] * 2 * TILE;
  KORCH_TILE_LOAD(4, rows.tile(0, PAIRS<A, B>.rows[0], 0), Rows::STRIDE);
  if constexpr (R == 2) KORCH_TILE_LOAD(5, rows.tile(0, PAIRS<A, B>.rows[0], 1), Rows::STRIDE);
  KORCH_TILE_LOAD(6, b + FIRST, 64L);
  KORCH_TILE_LOAD(7, b + FIRST + TILE, 64L);
  Floats zero = {};
  for (long s = 0; s < steps; ++s) {
    stay_awake(zero);
    const long after = s + 1 < steps ? s + 1 : s;
    const uint16_t* const b_after = s + 1 < steps ? b + STEP_OF<B> : b;
    [&]<int... T>(korch::Lanes<T...>) __attribute__((always_inline)) {
      (multiply_pair<R, A, B, T>(rows, b, b_after, s, after, beside), ...);
    }(typename korch::LanesTo<PAIRS<A, B>.count>::type());
    b = b_after;
  }
  KORCH_TILE_STORE(0, sums);
  KORCH_TILE_STORE(1, sums + EDGE);
  if constexpr (R == 2) {
    KORCH_TILE_STORE(2, sums + EDGE * 2 * EDGE);
    KORCH_TILE_STORE(3, sums + EDGE * 2 * EDGE + EDGE);
  }
}

// Whether all sums are finite; `count` is a multiple of 16.
KORCH_INLINE bool are_finite(const float* sums, long count) {
  Floats zero = {};
  for (long i = 0; i < count; i += 16) {
    const Floats x = korch::load<float, 16>(sums + i);
    zero += x - x;
  }
#if defined(__AVX512F__)
  return __builtin_ia32_cmpps512_mask(zero, Floats{}, 4, -1, 4) == 0;  // 4: unequal or unordered
#endif
  const Bits wrong = (Bits)(zero != 0.0f);
  uint32_t any = 0;
  for (int i = 0; i < 16; ++i) any |= wrong[i];
  return any == 0;
}

}  // namespace korch_amx
