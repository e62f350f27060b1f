// A convolution on matrix units: a product whose rows are read directly from the components of the image.
//
// The components of some rows of the image are stored as [steps of channels][components][classes][rows][pixels]
// [32 channels]. If there are strides, rows and columns i with equal i % stride form a class. So the pixels that one
// window position reads for 16 adjacent results form a tile, and the next window position's tile is at another offset.
// Tiles continue from one row of results into the next; results computed for positions between two rows are discarded.
//
// The terms come in units of 32: [rows of the window][steps of channels][columns of the window]. Either strips of 32
// columns of the product are kept in the cache while rows are streamed, BLOCK rows of results at a time; or all rows are
// kept while strips are streamed, some units at a time.
#pragma once

#include "korch_contract_split.h"

namespace korch_amx {

// KH and KW are the rows and columns of the window, SY and SX the strides, DY and DX the dilations, PITCH the pixels of an
// image row, C the channels, WIDTH the columns of the result, BLOCK the rows of the result that are computed together, P
// the components of a pixel's numbers.
template <long KH, long KW, long SY, long SX, long DY, long DX, long PITCH, long C, long WIDTH, long BLOCK, int P>
struct Window {
  static constexpr int COMPONENTS = P;  // of a pixel
  static constexpr long STEPS = korch::blocks(C, TERMS), UNITS = KH * STEPS * KW, RESULTS = WIDTH, AT_ONCE = BLOCK;
  static constexpr long DOWN = SY, ACROSS = SX, ROW = PITCH, CHANNELS = C;
  static constexpr long BEYOND = (KH - 1) * DY / SY, DEPTH = BLOCK + BEYOND;  // rows of a class
  static constexpr long EXTRA = (WIDTH - 1) * SX + (KW - 1) * DX + 1 - PITCH;  // pixels read beyond the last row, if any
  static constexpr long RUN = PITCH / SX;                                     // from a result to the one below
  static constexpr long COLUMNS = DEPTH * RUN + (EXTRA > 0 ? korch::blocks(EXTRA, SX) : 0);  // of a class
  static constexpr long PLANE = SX * COLUMNS, COMPONENT = SY * PLANE * TERMS;

  static constexpr long place(long u, long v) {
    return (u % SY * PLANE + u / SY * RUN + v % SX * COLUMNS + v / SX) * TERMS;
  }
  struct Offsets {
    int32_t at[UNITS];
  };
  static constexpr Offsets offsets() {
    Offsets found{};
    for (long unit = 0; unit < UNITS; ++unit)
      found.at[unit] = unit / KW % STEPS * P * COMPONENT + place(unit / (KW * STEPS) * DY, unit % KW * DX);
    return found;
  }
  static constexpr Offsets OFFSETS = offsets();

  // The channel of a term (in a unit, channels i and i + 16 form a pair), and its position in the window.
  static KORCH_INLINE long channel(long k) { return k / TERMS / KW % STEPS * TERMS + k % 2 * EDGE + k % TERMS / 2; }
  static KORCH_INLINE long down(long k) { return k / TERMS / (KW * STEPS); }
  static KORCH_INLINE long across(long k) { return k / TERMS % KW; }
  static KORCH_INLINE long number(long k) { return (down(k) * KW + across(k)) * C + channel(k); }
  // The number of rows of a class that `rows` rows of results read.
  static constexpr long met(long kind, long rows) {
    long found = 0;
    for (long y = 0; y < KH; ++y)
      if (y * DY % SY == kind) found = y * DY / SY + rows;
    return found;
  }
  static constexpr long down_of(long k) { return down(k) * DY; }
  static constexpr long across_of(long k) { return across(k) * DX; }
};

// Lines of weights in the order of units of terms; zero beyond the last channel.
template <class G, class From>
struct Taps {
  From from;
  template <int W>
  KORCH_INLINE korch::Vec<float, W> value(long k, long at) const {
    if (G::CHANNELS % TERMS != 0 && G::channel(k) >= G::CHANNELS) return korch::Vec<float, W>{};
    return from.template value<W>(G::number(k), at);
  }
  KORCH_INLINE void fetch(long k, long at) const {
    if (k < G::UNITS * TERMS) from.fetch(G::number(k), at);
  }
  // The lines of a unit whose channels all exist. Those of the next channels are prefetched.
  struct Lines {
    long first;
    static constexpr long AHEAD = TERMS;
    KORCH_INLINE long low(long i) const { return first + i; }
    KORCH_INLINE long high(long i) const { return first + EDGE + i; }
  };
  KORCH_INLINE Lines lines(long unit) const requires(G::CHANNELS % TERMS == 0) { return {G::number(unit * TERMS)}; }
  KORCH_INLINE From source() const { return from; }
};

template <class G>
struct PixelTiles {
  const uint16_t* from;
  const int32_t* at;
  static constexpr long STRIDE = TERMS * 2;
  static constexpr int COMPONENTS = G::COMPONENTS;
  KORCH_INLINE const uint16_t* tile(long step, long component, long tile) const {
    return from + at[step] + component * G::COMPONENT + tile * (EDGE * TERMS);
  }
};

// Splits the pixels that some rows of results read, one step of one pixel at a time. If LAST, all steps of a pixel come
// one after another; else all pixels of a step.
template <class G, bool LAST, class From>
struct Pixels {
  static constexpr long INNER = LAST ? G::STEPS : 1, OUTER = G::STEPS / INNER, AHEAD = LAST ? korch::larger(1, 8 / G::STEPS) : 8;
  From from;
  uint16_t* to;
  long first, rows;  // of results
  long run, runs, each;
  long u, v, end, step, left;  // of the current run

  KORCH_INLINE Pixels(const From& from, uint16_t* to, long first, long rows)
      : from(from), to(to), first(first), rows(rows), run(0), runs(rows > 0 ? G::DOWN * (rows + G::BEYOND) * OUTER : 0),
        each(0), u(0), v(0), end(0), step(0), left(0) {}
  static constexpr long most() { return G::DOWN * G::DEPTH * G::ROW * G::STEPS; }

  KORCH_INLINE bool begin() {
    while (run < runs) {
      const long kind = run / OUTER % G::DOWN, i = run / (OUTER * G::DOWN), met = G::met(kind, rows);
      step = run++ % OUTER;
      if (i >= met) continue;
      u = i * G::DOWN + kind, v = 0;
      end = G::ROW + (i == met - 1 ? korch::larger(0, G::EXTRA) : 0);
      left = end * INNER;
      return true;
    }
    return false;
  }
  KORCH_INLINE void make(long count) {
    while (count > 0) {
      if (left == 0 && !begin()) return;
      const long now = korch::smaller(count, left), y = u, row = first * G::DOWN + y;
      const From image = from;  // local copies, which stores can't alias
      uint16_t* const line = to;
      long x = v, s = step;
      for (long i = 0; i < now; ++i) {
        const long c = s * TERMS;
        Floats low = {}, high = {};
        if (x < G::ROW) {
          image.fetch(row, x + AHEAD, c);
          image.fetch(row, x + AHEAD, c + EDGE);
          low = some_of(image, row, x, c);
          if (c + EDGE < G::CHANNELS) high = some_of(image, row, x, c + EDGE);
        }
        korch_amx::split<G::COMPONENTS>(low, high, line + s * G::COMPONENTS * G::COMPONENT + G::place(y, x), G::COMPONENT);
        if (INNER == 1) ++x;
        else if (++s == INNER) s = 0, ++x;
      }
      v = x, step = s, left -= now, count -= now;
    }
  }
  static KORCH_INLINE Floats some_of(const From& from, long row, long v, long c) {
    if (G::CHANNELS % EDGE == 0 || c + EDGE <= G::CHANNELS) return from.template value<16>(row, v, c);
    return edge_of(from, row, v, c);
  }
  static __attribute__((noinline)) Floats edge_of(const From& from, long row, long v, long c) {
    alignas(64) float edge[EDGE] = {};
    for (long j = 0; c + j < G::CHANNELS; ++j) edge[j] = from.template value<1>(row, v, c + j);
    return korch::load<float, 16>(edge);
  }
  __attribute__((noinline)) void make_all() { make(runs * INNER * (G::ROW + korch::larger(0, G::EXTRA))); }
  // There are `turns` opportunities to split pixels while products are computed.
  KORCH_INLINE void pace(long turns) { each = korch::blocks(runs * INNER * G::ROW, turns); }
};
template <class G, bool LAST, class From>
KORCH_INLINE void prepare(Pixels<G, LAST, From>& next) {
  next.make(next.each);
}

// The rows of a product: `count` results, from whole rows of results.
template <class G, bool LAST, class From>
struct Image {
  From from;
  uint16_t* to;
  long count;
  static constexpr long terms = G::UNITS * TERMS;
  static constexpr int COMPONENTS = G::COMPONENTS;

  KORCH_INLINE Pixels<G, LAST, From> pixels(uint16_t* place, long row, long rows) const { return {from, place, row, rows}; }
  KORCH_INLINE long result(long q) const { return q % G::RUN < G::RESULTS ? q / G::RUN * G::RESULTS + q % G::RUN : -1; }
  KORCH_INLINE float term(long r, long k) const {
    const long v = r % G::RESULTS * G::ACROSS + G::across_of(k);
    if (G::channel(k) >= G::CHANNELS || v >= G::ROW) return 0;
    return from.template value<1>(r / G::RESULTS * G::DOWN + G::down_of(k), v, G::channel(k));
  }
};
template <class G, bool LAST, class From>
KORCH_INLINE Image<G, LAST, From> image_of(const From& from, uint16_t* to, long rows) {
  return {from, to, rows * G::RESULTS};
}
template <class G, int P, class From>
KORCH_INLINE Made<false, Taps<G, From>, P> taps_of(const From& from, uint16_t* to, long count) {
  return {{from}, to, count, G::UNITS * TERMS};
}

template <class G, class Sums, class Rows, class Columns>
struct Windows : Product<Sums, Rows, Columns> {
  typedef Product<Sums, Rows, Columns> Base;
  typedef typename Base::Pending Pending;
  using Base::columns;
  using Base::rows;
  // The numbers in the components of a block's rows, including those that the last tile reads beyond the end.
  static constexpr long IMAGE = G::COMPONENTS * G::STEPS * G::COMPONENT + TOGETHER * TERMS;

  static KORCH_INLINE long pixels_of(long some) { return (some - 1) * G::RUN + G::RESULTS; }

  // Strips of columns are kept while rows are streamed.
  inline void pass_rows() const {
    const long down = rows.count / G::RESULTS, across = korch::blocks(columns.count, TOGETHER);
    uint16_t *now = rows.to, *other = now + IMAGE;
    alignas(64) float found[2][SUMS];
    long turn = 0;
    Pending before;
    columns.make(across);
    rows.pixels(now, 0, korch::smaller(G::AT_ONCE, down)).make_all();
    for (long y = 0; y < down; y += G::AT_ONCE) {
      const long all = pixels_of(korch::smaller(G::AT_ONCE, down - y)), after = y + G::AT_ONCE;
      auto next = rows.pixels(other, after, korch::smaller(G::AT_ONCE, down - after));
      if (after < down) next.pace(korch::blocks(all, TOGETHER) * across * G::UNITS * Base::TURNS);
      for (long q = 0; q < all; q += TOGETHER)
        for (long s = 0; s < across; ++s) {
          float* const to = found[turn++ % 2];
          this->multiply(all - q, PixelTiles<G>{now + q * TERMS, G::OFFSETS.at}, columns.staying(s), G::UNITS, to, false, next, before);
          before = {to, y * G::RUN + q, y * G::RUN + korch::smaller(q + TOGETHER, all), s * TOGETHER};
        }
      next.make_all();
      uint16_t* const done = now;
      now = other, other = done;
    }
    this->finish(before, TOGETHER);
  }

  // Rows (at most AT_ONCE) are kept while strips are streamed, `most` units at a time.
  inline void pass_strips(long most) const {
    const long down = rows.count / G::RESULTS, across = korch::blocks(columns.count, TOGETHER), all = pixels_of(down);
    uint16_t *now = columns.to, *other = now + most * STEP_OF<Columns::COMPONENTS>;
    float* const kept = reinterpret_cast<float*>(other + most * STEP_OF<Columns::COMPONENTS>);
    alignas(64) float lone[2][SUMS];
    long turn = 0;
    Pending before;
    const auto part = [&](long s, long unit, uint16_t* to) {
      auto found = columns.split(s, to - unit * STEP_OF<Columns::COMPONENTS>);
      found.part = unit * PARTS, found.last = korch::smaller(unit + most, G::UNITS) * PARTS;
      return found;
    };
    rows.pixels(rows.to, 0, down).make_all();
    split_all(part(0, 0, now));
    for (long s = 0; s < across; ++s)
      for (long unit = 0; unit < G::UNITS; unit += most) {
        const long units = korch::smaller(most, G::UNITS - unit);
        const bool is_done = unit + units == G::UNITS;
        auto next = part(s + is_done, is_done ? 0 : unit + units, other);
        if (s + is_done == across) next.last = 0;
        next.each = korch::blocks(next.last - next.part, korch::blocks(all, TOGETHER) * units * Base::TURNS);
        for (long q = 0; q < all; q += TOGETHER) {
          float* const to = most < G::UNITS ? kept + q * TOGETHER : lone[turn++ % 2];
          this->multiply(all - q, PixelTiles<G>{rows.to + q * TERMS, G::OFFSETS.at + unit}, now, units, to, unit > 0, next, before);
          if (is_done) before = {to, q, korch::smaller(q + TOGETHER, all), s * TOGETHER};
        }
        uint16_t* const done = now;
        now = other, other = done;
      }
    this->finish(before, TOGETHER);
  }
};
template <class G, class Sums, class Rows, class Columns>
KORCH_INLINE Windows<G, Sums, Rows, Columns> windows_of(const Sums& sums, const Rows& rows, const Columns& columns) {
  return {{sums, rows, columns}};
}

}  // namespace korch_amx
