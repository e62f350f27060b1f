// A block of a product of float32 on the matrix units, whose operands are split into components (korch_amx.h).
//
// The components of one operand stay in the cache, while the other goes by: 32 of its rows or columns at a time are
// split and multiplied by all that stay. Meanwhile the vector units split what goes by next, or fetch it if it
// comes as components, and finish the sums before. Where the units can't be used, the vector units compute all sums.
#pragma once

#include <type_traits>

#include "korch_amx.h"
#include "korch_contract.h"

namespace korch_amx {

// The units of a thread, while it computes tasks.
struct Units {
  Units() {
    if (is_ready()) begin();
  }
  ~Units() {
    if (is_ready()) end();
  }
};

// Where a splitter finds the numbers that functions compute: `get<W>` W neighbours, `ahead` fetches one.
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

// An operand that is split in the run: `count` rows whose terms are neighbours, or columns that are neighbours.
// `to` has room for the P components of each of all, or, of what goes by, for two times 32 rows or columns.
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
  // What goes by next, if there is more; `turns` blocks of the other operand are multiplied meanwhile.
  KORCH_INLINE Splitter<IS_ROWS, From, P> next(long block, long turns, long pairs) const {
    Splitter<IS_ROWS, From, P> found = split(block, to + block % 2 * apart());
    if (block * TOGETHER >= count) found.last = 0;
    else found.each = parts_beside(turns, pairs);
    return found;
  }
  KORCH_INLINE Block<P> tiles(const uint16_t* block) const { return {block}; }
  KORCH_INLINE long result(long row) const { return row; }
  // The term k of row `line`, and of some columns from `line` on.
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

// Components that are fetched while products are computed.
struct Fetcher {
  const uint16_t* from;
  long left, each;  // lines
};

// Columns that come as P components, in strips of 32 that are `far` numbers apart.
template <int P>
struct Given {
  const uint16_t* from;
  long far, count, terms;
  static constexpr int COMPONENTS = P;

  KORCH_INLINE const uint16_t* staying(long block) const { return from + block * far; }
  KORCH_INLINE const uint16_t* passing(long block) const { return staying(block); }
  KORCH_INLINE void make(long) const {}
  // What goes by next: behind the last strip, the terms behind these, which the next product may have.
  KORCH_INLINE Fetcher next(long block, long turns, long pairs) const {
    constexpr long LINES = STEP_OF<P> / TERMS;  // of a step
    const long lines = korch::blocks(terms, TERMS) * LINES;
    const uint16_t* const place = block * TOGETHER < count ? staying(block) : from + lines * TERMS;
    return {place, lines, korch::blocks(LINES, pairs * turns)};
  }
  // The components' sum: the last first, as the first two of a number near the largest may have an infinite sum.
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

// A product's block: what takes its sums, and its operands.
template <class Sums, class Rows, class Columns>
struct Product {
  const Sums sums;
  const Rows rows;
  const Columns columns;
  static constexpr long TURNS = PAIRS<Rows::COMPONENTS, Columns::COMPONENTS>.count;
  // What is infinite, or no number, is one component as it is.
  static constexpr bool ARE_WHOLE = Rows::COMPONENTS == 1 && Columns::COMPONENTS == 1;

  // Sums whose rows are to be finished, while those that come next are computed.
  struct Pending {
    const float* from = nullptr;
    long row = 0, end = 0, column = 0;
  };

  // Row r of some sums from column n on, of float32 numbers.
  __attribute__((noinline)) void sum_again(long r, long n, float* to) const {
    Floats found[2] = {};
    for (long k = 0; k < rows.terms; ++k) {
      const Floats x = korch::splat<float, 16>(rows.term(r, k));
      for (long t = 0; t < 2; ++t) found[t] += x * columns.columns(n + t * EDGE, k, columns.count - n - t * EDGE);
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

  // Finish up to `count` rows. What is no number may have been too large for components, so such a row is computed
  // once more.
  __attribute__((noinline)) void finish(Pending& pending, long count) const {
    for (; count > 0 && pending.row < pending.end; --count, ++pending.row, pending.from += TOGETHER) {
      const long row = rows.result(pending.row);
      if (row < 0) continue;
      alignas(64) float again[TOGETHER];
      const bool is_known = ARE_WHOLE || are_finite(pending.from, TOGETHER);
      if (!is_known) sum_again(row, pending.column, again);
      finish_row(is_known ? pending.from : again, row, pending.column);
    }
  }

  // What the vector units do beside four products of tiles.
  template <class Next>
  __attribute__((noinline)) void work_beside(Next& next, Pending& before, long count) const {
    prepare(next);
    if (before.row < before.end) finish(before, count);
  }

  // Multiply 16 R rows by 32 columns, beside what comes next and what was multiplied before.
  template <int R, class Tiles, class Next>
  __attribute__((noinline)) void multiply(Tiles a, const uint16_t* b, long steps, float* to, bool adds, Next& next, Pending& before) const {
    const long each = korch::blocks(TOGETHER, TURNS * steps);
    multiply_tiles<R, Columns::COMPONENTS>(a, b, steps, to, adds, [&]() __attribute__((always_inline)) {
      if (next.each > 0 || before.row < before.end) work_beside(next, before, each);
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
};
template <class Sums, class Rows, class Columns>
Product(Sums, Rows, Columns) -> Product<Sums, Rows, Columns>;

}  // namespace korch_amx
