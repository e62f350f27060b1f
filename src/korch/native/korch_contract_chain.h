// A product in a chain of convolutions on matrix units: rows of an image by columns that come as components (korch_amx.h).
//
// The rows are pixels ("places") of an image. Some rows at a time are split into components, multiplied by all strips of
// columns, and finished immediately. Finishing them later, while the next products are computed, would save no time with
// this much work for the vector units: matrix products and float32 arithmetic hardly overlap (measured on Granite Rapids),
// and the sums would then be farther away in the cache hierarchy.
#pragma once

#include "korch_contract_split.h"
#include "korch_contract_window.h"

namespace korch_amx {

inline constexpr unsigned long RING = 4 * TOGETHER;  // rows whose components fit into the ring buffer
inline constexpr long TURN = 8;             // rows that are split at a time, for one step of terms

// The address for the first component of 32 terms of a row.
KORCH_INLINE uint16_t* place_of(uint16_t* to, long apart, unsigned long row, unsigned long k) {
  return to + row % RING / TOGETHER * apart + row % TOGETHER * TERMS + k / TERMS * STEP;
}

// The position of the splitting: next is the step of terms from k on, for rows from `row` on, within `begin` to `until`.
struct Cursor {
  long terms, begin, until, row, k;
  KORCH_INLINE bool has_more() const { return row < until; }
  KORCH_INLINE void go_on(long end) { begin = row, until = end, k = 0; }
  KORCH_INLINE void advance(long to) {
    row = to;
    if (row >= until && k + TERMS < terms) row = begin, k += TERMS;
  }
};

// Rows whose numbers a function of (row, term) returns, from row number `first` on.
template <class From>
struct Read {
  From from;
  long first, terms;

  // Terms k to k + 15 of a row.
  KORCH_INLINE Floats values(long row, long k) const {
    return terms - k >= EDGE ? from.template value<16>(first + row, k) : some(from, first + row, k, terms - k);
  }
  KORCH_ALONE void make(Cursor& at, uint16_t* to, long apart) const {
    const Read own = *this;  // a local copy, which stores can't alias
    const long k = at.k, end = korch::smaller(at.row + TURN, at.until);
    for (long row = at.row; row < end; ++row) {
      own.from.fetch(own.first + row + TOGETHER, k);
      own.from.fetch(own.first + row + TOGETHER, k + EDGE);
      const Floats low = own.values(row, k), high = k + EDGE < own.terms ? own.values(row, k + EDGE) : Floats{};
      split_line<MOST_COMPONENTS>(low, high, place_of(to, apart, row, k), 2 * TILE, korch::LanesTo<TERMS>::type());
    }
    at.advance(end);
  }
};
template <class From>
KORCH_INLINE Read<From> read_rows(const From& from, long first, long terms) { return {from, first, terms}; }

// Rows that a depthwise convolution K computes, R at a time; an image row of its result has OUT of them. `windows` calls a
// function for each row of the window of row y and of a block of 16 channels, with pointers to it and to its weights, and
// its distance from the window's first row; blocks are BLOCK numbers apart. `finish` computes from the sums the numbers
// that are then split.
template <class K, long BLOCK, class Windows, class Finish>
struct Fed;
template <int R, long OUT, int KW, long S, long D, long UNIT, long BEFORE, long OVER, long PANEL, long ROW, long LAST,
          bool FETCHES, bool IS_PARTIAL, long BLOCK, class Windows, class Finish>
struct Fed<korch::WindowContraction<16, R, OUT, KW, S, D, UNIT, BEFORE, OVER, PANEL, ROW, LAST, FETCHES, IS_PARTIAL>, BLOCK,
           Windows, Finish> {
  typedef korch::WindowContraction<16, R, OUT, KW, S, D, UNIT, BEFORE, OVER, PANEL, ROW, LAST, FETCHES, IS_PARTIAL> K;
  Windows windows;
  Finish finish;
  long first, terms;

  // The values of COUNT places from x on of row y, of NV blocks of 16 channels from number q on.
  template <int COUNT, long AT, int NV>
  KORCH_INLINE void compute(long q, long y, long x, Floats (&sum)[COUNT][NV]) const {
    constexpr long ALL = (COUNT - 1) * S + K::REACH;
    const long left = (AT >= 0 ? AT : x) * S - BEFORE;
    windows(q, y, [&](const auto* a, const float* w, long from) __attribute__((always_inline)) {
      a += (AT >= 0 ? AT : x) * (S * UNIT);
      if (FETCHES && from == LAST) {  // the data of the row below: prefetchers don't predict it, as channels alternate
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n)
#pragma GCC unroll 64
          for (long p = 0; p < ALL; ++p) __builtin_prefetch(a + S * ROW + p * UNIT + n * BLOCK, 0, 2);
      }
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) {
        Floats v[KW];
#pragma GCC unroll 16
        for (int k = 0; k < KW; ++k) v[k] = korch::load<float, 16>(w + n * PANEL + k * EDGE);
#pragma GCC unroll 64
        for (long p = 0; p < ALL; ++p) {
          if (AT == korch::ANYWHERE ? left + p < 0 || left + p >= K::WIDTH : K::template is_outside<AT>(p)) continue;
          Floats read = korch::load<float, 16>(a + p * UNIT + n * BLOCK);
          KORCH_KEEP(read);
#pragma GCC unroll 16
          for (int k = 0; k < KW; ++k) {
            const long r = p - k * D;
            if (r >= 0 && r % S == 0 && r / S < COUNT) sum[r / S][n] += v[k] * read;
          }
        }
      }
    });
#pragma GCC unroll 16
    for (long r = 0; r < COUNT; ++r)
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) sum[r][n] = finish.template operator()<16>(sum[r][n], q + n, y, x + r, 0);
  }
  KORCH_ALONE Floats values(long row, long k) const {
    Floats sum[1][1] = {};
    compute<1, korch::ANYWHERE, 1>(k / EDGE, (first + row) / OUT, (first + row) % OUT, sum);
    return sum[0][0];
  }

  template <int COUNT, long AT, int NV>
  KORCH_ALONE void split_places(long q, long y, long x, long made, uint16_t* to, long apart) const {
    const Fed own = *this;  // a local copy, which stores can't alias
    Floats sum[COUNT][NV] = {};
    own.template compute<COUNT, AT, NV>(q, y, x, sum);
#pragma GCC unroll 16
    for (long r = 0; r < COUNT; ++r)
      split_line<MOST_COMPONENTS>(sum[r][0], NV > 1 ? sum[r][NV - 1] : Floats{}, place_of(to, apart, made + r, q * EDGE), 2 * TILE,
                 korch::LanesTo<TERMS>::type());
  }
  template <int NV>
  KORCH_INLINE void make_places(long q, long y, long x, long made, uint16_t* to, long apart) const {
    K::Tiles::at(x, [&]<int COUNT, long AT>(long at) __attribute__((always_inline)) {
      split_places<COUNT, AT, NV>(q, y, at, made, to, apart);
    });
  }
  KORCH_INLINE void make(Cursor& at, uint16_t* to, long apart) const {
    const long y = (first + at.row) / OUT, x = (first + at.row) % OUT;
    if (at.k + EDGE < terms) make_places<2>(at.k / EDGE, y, x, at.row, to, apart);
    else make_places<1>(at.k / EDGE, y, x, at.row, to, apart);
    at.advance(at.row + korch::smaller(R, OUT - x));
  }
};
template <class K, long BLOCK, class Windows, class Finish>
KORCH_INLINE Fed<K, BLOCK, Windows, Finish> fed_rows(const Windows& windows, const Finish& finish, long first, long terms) {
  return {windows, finish, first, terms};
}

template <class Sums, class Rows>
struct Chained {
  const Sums sums;
  const Rows rows;
  const Given<MOST_COMPONENTS> columns;

  template <int V>
  KORCH_INLINE void end(long row, long n, korch::Vec<float, V> sum) const {
    sums.template end<V>(rows.first + row, n, sum);
  }
  KORCH_INLINE void end_some(const float* found, long row, long n) const {
    for (long t = 0; t < TOGETHER; t += EDGE)
      if (n + t + EDGE <= columns.count) end<16>(row, n + t, korch::load<float, 16>(found + t));
      else
        for (long j = t; j < t + EDGE && n + j < columns.count; ++j) end<1>(row, n + j, found[j]);
  }
  // Compute and finish row `row` of the sums from column n on again, from the float32 numbers.
  KORCH_ALONE void end_again(long row, long n) const {
    alignas(64) float found[TOGETHER] = {};
    for (long k = 0; k < rows.terms; k += EDGE) {
      const Floats x = rows.values(row, k);
      for (long i = 0; i < EDGE && k + i < rows.terms; ++i)
        for (long t = 0; t < TOGETHER; t += EDGE)
          korch::store<float, 16>(found + t, korch::load<float, 16>(found + t) +
                                                 korch::splat<float, 16>(x[i]) * columns.columns(n + t, k + i, EDGE));
    }
    end_some(found, row, n);
  }
  // A NaN or infinity may come from a number that is too large for components, so such a row is computed again.
  KORCH_ALONE void finish(const float* found, long first, long count, long n) const {
    const Chained own = *this;  // a local copy, which stores can't alias
    if (n + TOGETHER <= own.columns.count && are_finite(found, count * TOGETHER)) {
      for (long row = first; row < first + count; ++row, found += TOGETHER) {
        own.template end<16>(row, n, korch::load<float, 16>(found));
        own.template end<16>(row, n + EDGE, korch::load<float, 16>(found + EDGE));
      }
      return;
    }
    for (long row = first; row < first + count; ++row, found += TOGETHER)
      if (are_finite(found, TOGETHER)) own.end_some(found, row, n);
      else own.end_again(row, n);
  }
  KORCH_ALONE void make(Cursor& next, uint16_t* to, long apart) const { rows.make(next, to, apart); }
  template <int R>
  KORCH_ALONE void multiply(const uint16_t* a, const uint16_t* b, long steps, float* found, Cursor& next, uint16_t* to, long each) const {
    long turn = 0;
    multiply_tiles<R>(Block<>{a}, b, steps, found, false, [&]() __attribute__((always_inline)) {
      if (--turn <= 0 && next.has_more()) make(next, to, steps * STEP), turn = each;
    });
  }

  // `count` rows.
  inline void run(uint16_t* to, long count) const {
    if (!is_ready()) {
      for (long n = 0; n < columns.count; n += TOGETHER)
        for (long row = 0; row < count; ++row) end_again(row, n);
      return;
    }
    const long steps = korch::blocks(rows.terms, TERMS), apart = steps * STEP;
    alignas(64) float found[SUMS];
    Cursor next{rows.terms, 0, korch::smaller(TOGETHER, count), 0, 0};
    const long each = korch::larger(1, korch::blocks(columns.count, TOGETHER) * TURNS * TURN / TOGETHER);
    for (long row = 0; row < count; row += TOGETHER) {
      const long some = korch::smaller(TOGETHER, count - row);
      const uint16_t* const a = to + row % RING / TOGETHER * apart;
      while (next.has_more()) make(next, to, apart);
      next.go_on(korch::smaller(row + 2 * TOGETHER, count));
      for (long n = 0; n < columns.count; n += TOGETHER) {
        const uint16_t* const b = columns.staying(n / TOGETHER);
        if (some > EDGE) multiply<2>(a, b, steps, found, next, to, each);
        else multiply<1>(a, b, steps, found, next, to, each);
        finish(found, row, some, n);
      }
    }
  }
};
template <class Sums, class Rows>
Chained(Sums, Rows, Given<MOST_COMPONENTS>) -> Chained<Sums, Rows>;

}  // namespace korch_amx
