// A block of a float32 matrix product on matrix units, whose operands are split into components (korch_amx.h).
//
// The components of one operand are kept in the cache while the other operand is streamed: 32 of its rows or columns at a
// time are split and multiplied by all of the kept operand. Meanwhile, the vector units split the next rows or columns (or
// prefetch them if they come as components) and finish the previous sums. If matrix units can't be used, vector units
// compute all sums.
#pragma once

#include <type_traits>

#include "korch_amx.h"
#include "korch_contract.h"

namespace korch_amx {

// How many parts to split during four products of tiles so that all are split while `count` blocks are multiplied.
KORCH_INLINE long parts_beside(long count, long turns) { return korch::blocks(PARTS, turns * count); }

// Split all parts. For rows, adjacent steps of the same row are split first, because rows a multiple of a page apart
// evict each other's cache lines.
template <bool IS_ROWS, class From, int P>
__attribute__((noinline)) void split_all(const Splitter<IS_ROWS, From, P>& s) {
  const long apart = IS_ROWS ? PARTS : 1;
  for (long first = 0; first < apart; ++first)
    for (long part = first; part < s.last; part += apart) split_part(s.own, part);
}

// Configures the matrix units for a thread while an object exists.
struct Units {
  Units() {
    if (is_ready()) begin();
  }
  ~Units() {
    if (is_ready()) end();
  }
};

// A source of numbers for a splitter: `get<W>` computes W adjacent numbers, `ahead` prefetches one.
template <class Get, class Ahead>
struct Computed {
  Get get;
  Ahead ahead;
  template <int W, class... At>
  KORCH_INLINE korch::Vec<float, W> value(At... at) const { return get.template operator()<W>(at...); }
  template <class... At>
  KORCH_INLINE void fetch(At... at) const { ahead(at...); }
};
template <class Get, class Ahead>
Computed(Get, Ahead) -> Computed<Get, Ahead>;

// Join the numbers of two terms, whose values are already bfloat16.
KORCH_INLINE Bits joined(Floats low, Floats high) { return ((Bits)low >> 16) | (Bits)high; }

// A source of columns for which `pairs` returns two terms at once, as a pair of bfloat16 per column, for pair number `row`.
template <class From, class Pairs>
struct Paired : From {
  Pairs pairs;
  KORCH_INLINE auto pairs_of(long row, long column) const {
    return [=, own = pairs, at = row]() mutable { return own(at++, column); };
  }
};
template <class From, class Pairs>
KORCH_INLINE Paired<From, Pairs> paired(From from, Pairs pairs) {
  return {from, pairs};
}

// A source of columns whose terms are looked up in two tables of bfloat16, one for the lower and one for the upper half
// of a byte. `place` returns the address of the bytes of a row; rows have a constant stride.
template <class From, class Place, unsigned... TABLE>
struct LookedUp : From {
  typedef korch::Vec<uint16_t, 32> Halves;
  static constexpr long AHEAD = 2 * TERMS;  // the prefetch distance in rows
  static constexpr unsigned ENTRIES[32] = {TABLE...};
  static constexpr bool IS_ONE_TABLE = [] {
    for (int i = 0; i < 16; ++i)
      if (ENTRIES[i] != ENTRIES[16 + i]) return false;
    return true;
  }();
  Place place;
  KORCH_INLINE auto pairs_of(long row, long column) const {
    const uint8_t* const first = place(row, column);
    const long step = place(row + 1, column) - first;
    return [at = first, step]() mutable {
      constexpr Halves table = {TABLE...};
      const Bits bytes = korch::cast<uint32_t, uint8_t, 16>(korch::load<uint8_t, 16>(at));
      __builtin_prefetch(at + AHEAD * step);
      Bits places = (bytes & 15) | bytes << 12;  // the lookup uses five bits of each half
      if constexpr (!IS_ONE_TABLE) places |= 0x00100000;
      at += step;
#if defined(__AVX512BW__)
      typedef short Shorts __attribute__((vector_size(64)));
#if defined(__clang__)
      return (Bits)__builtin_ia32_permvarhi512((Shorts)table, (Shorts)places);
#else
      return (Bits)__builtin_ia32_permvarhi512_mask((Shorts)table, (Shorts)places, Shorts{}, -1);
#endif
#else
      Halves found;
      for (int i = 0; i < 32; ++i) found[i] = table[((Halves)places)[i] % 32];
      return (Bits)found;
#endif
    };
  }
};
template <unsigned... TABLE, class From, class Place>
KORCH_INLINE LookedUp<From, Place, TABLE...> looked_up(From from, Place place) {
  return {from, place};
}

// An operand that is split at run time: `count` rows whose terms are adjacent, or columns that are adjacent. `to` has
// memory for the P components of the whole operand if it is kept, or of two blocks of 32 rows or columns if it is streamed.
template <bool IS_ROWS, class From, int P>
struct Made {
  From from;
  uint16_t* to;
  long count, terms;
  static constexpr int COMPONENTS = P;

  KORCH_INLINE long apart() const { return korch::blocks(terms, TERMS) * STEP_OF<P>; }
  KORCH_INLINE const uint16_t* staying(long block) const { return to + block * apart(); }
  KORCH_INLINE const uint16_t* passing(long block) const { return staying(block % 2); }
  KORCH_INLINE Splitter<IS_ROWS, From, P> split(long block, uint16_t* place) const {
    const long first = block * TOGETHER;
    return splitter<IS_ROWS, P>(from, first, korch::smaller(TOGETHER, count - first), terms, place);
  }
  inline void make(long blocks) const {
    for (long b = 0; b < blocks; ++b) split_all(split(b, to + b * apart()));
  }
  // The next block to stream, if there is one; `turns` blocks of the other operand are multiplied meanwhile.
  KORCH_INLINE Splitter<IS_ROWS, From, P> next(long block, long turns, long pairs) const {
    Splitter<IS_ROWS, From, P> found = split(block, to + block % 2 * apart());
    if (block * TOGETHER >= count) found.last = 0;
    else found.each = parts_beside(turns, pairs);
    return found;
  }
  KORCH_INLINE Block<P> tiles(const uint16_t* block) const { return {block}; }
  KORCH_INLINE long result(long row) const { return row; }
  // Term k of row `line`, and term k of some columns from column `line` on.
  KORCH_INLINE float term(long line, long k) const { return from.template value<1>(line, k); }
  KORCH_INLINE Floats columns(long line, long k, long some_columns) const { return some(from, k, line, some_columns); }
};

template <int P, class From>
KORCH_INLINE Made<true, From, P> rows_of(const From& from, uint16_t* to, long count, long terms) {
  return {from, to, count, terms};
}
template <int P, class From>
KORCH_INLINE Made<false, From, P> columns_of(const From& from, uint16_t* to, long count, long terms) {
  return {from, to, count, terms};
}

// Components to prefetch while products are computed.
struct Fetcher {
  const uint16_t* from;
  long left, each;  // lines
};

// Columns that are already split into P components, in strips of 32 columns that are `far` numbers apart.
template <int P>
struct Given {
  const uint16_t* from;
  long far, count, terms;
  static constexpr int COMPONENTS = P;

  KORCH_INLINE const uint16_t* staying(long block) const { return from + block * far; }
  KORCH_INLINE const uint16_t* passing(long block) const { return staying(block); }
  KORCH_INLINE void make(long) const {}
  // The next strip to prefetch. After the last strip, the terms after these, which the next product may read.
  KORCH_INLINE Fetcher next(long block, long turns, long pairs) const {
    constexpr long LINES = STEP_OF<P> / TERMS;  // of a step
    const long lines = korch::blocks(terms, TERMS) * LINES;
    const uint16_t* const place = block * TOGETHER < count ? staying(block) : from + lines * TERMS;
    return {place, lines, korch::blocks(LINES, pairs * turns)};
  }
  // The sum of the components, the last one first: for a number near the largest, the first two may sum to infinity.
  KORCH_INLINE Floats columns(long line, long k, long) const {
    const long tile = line % TOGETHER / EDGE;
    const uint16_t* const pair = staying(line / TOGETHER) + k / TERMS * STEP_OF<P> + tile * TILE + k % TERMS / 2 * TERMS;
    Floats sum = {};
    for (long i = P - 1; i >= 0; --i) {
      Bits both;
      memcpy(&both, pair + i * 2 * TILE, sizeof(both));
      sum += (Floats)(k % 2 ? both & 0xFFFF0000 : both << 16);
    }
    return sum;
  }
};

template <bool IS_ROWS, class From, int P>
KORCH_INLINE void prepare(Splitter<IS_ROWS, From, P>& next) {
  split_some(next, next.each);
}
KORCH_INLINE void prepare(Fetcher& next) {
  for (long i = korch::smaller(next.each, next.left); i > 0; --i, --next.left, next.from += TERMS)
    __builtin_prefetch(next.from, 0, 2);
}

// No factors.
struct NoFactors {
  static constexpr long STEPS = 0;
};
// A factor for each column and each block of S steps of terms: the sums of a block are multiplied, not its products.
template <long S, class Get>
struct Factors {
  Get get;
  static constexpr long STEPS = S;
  KORCH_INLINE Floats of(long block, long column) const { return get(block, column); }
};
template <long S, class Get>
KORCH_INLINE Factors<S, Get> factors_of(Get get) {
  return {get};
}

// A block of a product: the receiver of its sums, its operands, and factors.
template <class Sums, class Rows, class Columns, class Scales = NoFactors>
struct Product {
  const Sums sums;
  const Rows rows;
  const Columns columns;
  const Scales scales = {};
  static constexpr long TURNS = PAIRS<Rows::COMPONENTS, Columns::COMPONENTS>.count;
  // With single components, NaN and infinity need no special treatment: they are represented exactly.
  static constexpr bool ARE_WHOLE = Rows::COMPONENTS == 1 && Columns::COMPONENTS == 1;

  // Sums whose rows are still to be finished, while the next sums are computed. If there are factors, these are the sums
  // of one block of terms; their multiples are accumulated in `totals`.
  struct Pending {
    const float* from = nullptr;
    long row = 0, end = 0, column = 0;
    float* totals = nullptr;
    long block = 0;
    bool is_last = true;
  };

  // Compute 32 sums of row r from column n on again, from the float32 numbers.
  __attribute__((noinline)) void sum_again(long r, long n, float* to) const {
    Floats found[2] = {};
    for (long k = 0; k < rows.terms; ++k) {
      const Floats x = korch::splat<float, 16>(rows.term(r, k));
      for (long t = 0; t < 2; ++t) {
        Floats y = columns.columns(n + t * EDGE, k, columns.count - n - t * EDGE);
        if constexpr (Scales::STEPS > 0) y *= scales.of(k / (Scales::STEPS * TERMS), n + t * EDGE);
        found[t] += x * y;
      }
    }
    for (long t = 0; t < 2; ++t) korch::store<float, 16>(to + t * EDGE, found[t]);
  }

  KORCH_INLINE void finish_row(const float* from, long r, long n) const {
#pragma GCC unroll 2
    for (long t = 0; t < 2; ++t, n += EDGE, from += EDGE) {
      if (n + EDGE <= columns.count || (Sums::IS_WHOLE && n < columns.count)) {
        sums.template end<16>(r, n, sums.template begin<16>(r, n) + korch::load<float, 16>(from));
      } else {
        for (long j = 0; j < columns.count - n; ++j)
          sums.template end<1>(r, n + j, sums.template begin<1>(r, n + j) + from[j]);
      }
    }
  }

  // Finish up to `count` rows. A NaN or infinity may come from a number that is too large for components, so such a row
  // is computed again.
  __attribute__((noinline)) void finish(Pending& pending, long count) const {
    if constexpr (Scales::STEPS > 0) {
      if (!pending.is_last) return pending.block > 0 ? add<false>(pending, count) : add<true>(pending, count);
    }
    for (; count > 0 && pending.row < pending.end; --count, ++pending.row, pending.from += TOGETHER) {
      const long row = rows.result(pending.row);
      if (row < 0) continue;
      alignas(64) float other[TOGETHER];
      const float* from = pending.from;
      if constexpr (Scales::STEPS > 0) {
        for (long t = 0; t < 2; ++t) korch::store<float, 16>(other + t * EDGE, scaled(pending, t));
        from = other;
        pending.totals += TOGETHER;
      }
      const bool is_known = ARE_WHOLE || are_finite(from, TOGETHER);
      if (!is_known) {
        sum_again(row, pending.column, other);
        from = other;
      }
      finish_row(from, row, pending.column);
    }
  }
  // The multiples of 16 sums of a row, plus the totals of the previous blocks of terms.
  KORCH_INLINE Floats scaled(const Pending& pending, long t) const {
    const Floats factors = scales.of(pending.block, pending.column + t * EDGE);
    const Floats before = pending.block > 0 ? korch::load<float, 16>(pending.totals + t * EDGE) : Floats{};
    return factors * korch::load<float, 16>(pending.from + t * EDGE) + before;
  }
  // Add up to `count` rows of a block's multiplied sums to the totals of the previous blocks of terms.
  template <bool IS_FIRST>
  KORCH_INLINE void add(Pending& pending, long count) const {
    const Floats factors[2] = {scales.of(pending.block, pending.column), scales.of(pending.block, pending.column + EDGE)};
    const long rows_left = korch::smaller(count, pending.end - pending.row);
    const float* const from = pending.from;
    float* const to = pending.totals;
    for (long i = 0; i < rows_left * TOGETHER; i += TOGETHER) {
#pragma GCC unroll 2
      for (long t = 0; t < 2; ++t) {
        const Floats before = IS_FIRST ? Floats{} : korch::load<float, 16>(to + i + t * EDGE);
        korch::store<float, 16>(to + i + t * EDGE, factors[t] * korch::load<float, 16>(from + i + t * EDGE) + before);
      }
    }
    pending.row += rows_left, pending.from += rows_left * TOGETHER, pending.totals += rows_left * TOGETHER;
  }

  // Multiply 16 R rows by 32 columns; meanwhile prepare the next block and finish the previous sums. The splitting is
  // inlined: with a call for each four products of tiles, products of float32 took 1.2 times as long.
  template <int R, class Tiles, class Next>
  __attribute__((noinline)) void multiply(Tiles a, const uint16_t* b, long steps, float* to, bool adds, Next& next, Pending& before) const {
    const long each = korch::blocks(TOGETHER, TURNS * steps);
    multiply_tiles<R, Columns::COMPONENTS>(a, b, steps, to, adds, [&]() __attribute__((always_inline)) {
      prepare(next);
      if (before.row < before.end) finish(before, each);
    });
  }
  template <class Tiles, class Next>
  KORCH_INLINE void multiply(long count, Tiles a, const uint16_t* b, long steps, float* to, bool adds, Next& next, Pending& before) const {
    if (count > EDGE) multiply<2>(a, b, steps, to, adds, next, before);
    else multiply<1>(a, b, steps, to, adds, next, before);
  }

  // All sums on the vector units.
  __attribute__((noinline)) void run_again() const {
    alignas(64) float found[TOGETHER];
    for (long n = 0; n < columns.count; n += TOGETHER)
      for (long r = 0; r < rows.count; ++r) {
        sum_again(r, n, found);
        finish_row(found, r, n);
      }
  }

  template <bool ROWS_PASS>
  inline void run() const {
    const long steps = korch::blocks(rows.terms, TERMS);
    const long down = korch::blocks(rows.count, TOGETHER), across = korch::blocks(columns.count, TOGETHER);
    alignas(64) float found[2][SUMS];
    if (!is_ready()) return run_again();
    long turn = 0;
    Pending before;
    const auto pass = [&](long r, long s, auto& next) __attribute__((always_inline)) {
      const uint16_t* const a = ROWS_PASS ? rows.passing(r) : rows.staying(r);
      const uint16_t* const b = ROWS_PASS ? columns.staying(s) : columns.passing(s);
      const long first = r * TOGETHER, end = korch::smaller(first + TOGETHER, rows.count);
      float* const to = found[turn++ % 2];
      multiply(end - first, rows.tiles(a), b, steps, to, false, next, before);
      before = {to, first, end, s * TOGETHER};
    };
    if constexpr (ROWS_PASS) {
      columns.make(across);
      rows.make(1);
      for (long r = 0; r < down; ++r) {
        auto next = rows.next(r + 1, across, TURNS);
        for (long s = 0; s < across; ++s) pass(r, s, next);
      }
    } else {
      rows.make(down);
      columns.make(1);
      for (long s = 0; s < across; ++s) {
        auto next = columns.next(s + 1, down, TURNS);
        for (long r = 0; r < down; ++r) pass(r, s, next);
      }
    }
    finish(before, TOGETHER);
  }

  // The same if there are factors, for up to 32 MOST_BLOCKS rows. Columns are split one block of terms at a time, so that
  // their components are in the level-1 cache when they are multiplied.
  inline void run_blocks() const {
    constexpr long BLOCK = Scales::STEPS, EACH = BLOCK * PARTS, PLACE = BLOCK * STEP_OF<Columns::COMPONENTS>;
    const long blocks = korch::blocks(rows.terms, TERMS) / BLOCK;
    const long down = korch::blocks(rows.count, TOGETHER), across = korch::blocks(columns.count, TOGETHER);
    alignas(64) float found[2][SUMS], totals[MOST_BLOCKS][SUMS];
    if (!is_ready()) return run_again();
    rows.make(down);
    // Block k of terms of strip s, and its memory: two buffers are used alternately.
    const auto block_of = [&](long s, long k) __attribute__((always_inline)) {
      auto next = columns.split(s, columns.to + (s * blocks + k) % 2 * PLACE - k * PLACE);
      next.part = k * EACH, next.last = s < across ? next.part + EACH : 0, next.each = parts_beside(down, TURNS);
      return next;
    };
    auto first_block = block_of(0, 0);
    split_some(first_block, EACH);
    long turn = 0;
    Pending pending[2];  // used in place: copying an object that was just written would stall
    for (long s = 0; s < across; ++s)
      for (long k = 0; k < blocks; ++k) {
        auto next = k + 1 < blocks ? block_of(s, k + 1) : block_of(s + 1, 0);
        const uint16_t* const b = columns.to + (s * blocks + k) % 2 * PLACE;
        for (long r = 0; r < down; ++r, ++turn) {
          const long first = r * TOGETHER, end = korch::smaller(first + TOGETHER, rows.count);
          const uint16_t* const a = rows.staying(r) + k * BLOCK * STEP_OF<Rows::COMPONENTS>;
          multiply(end - first, rows.tiles(a), b, BLOCK, found[turn % 2], false, next, pending[(turn + 1) % 2]);
          pending[turn % 2] = {found[turn % 2], first, end, s * TOGETHER, totals[r], k, k + 1 == blocks};
        }
      }
    finish(pending[(turn + 1) % 2], TOGETHER);
  }
  static constexpr long MOST_BLOCKS = 4;
};
template <class Sums, class Rows, class Columns>
Product(Sums, Rows, Columns) -> Product<Sums, Rows, Columns>;
template <class Sums, class Rows, class Columns, class Scales>
Product(Sums, Rows, Columns, Scales) -> Product<Sums, Rows, Columns, Scales>;

}  // namespace korch_amx
