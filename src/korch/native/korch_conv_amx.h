// A dense convolution on the matrix units, numbers split into pieces (korch_amx.h): a matrix product
// whose left operand is the image itself.
//
// The pieces of some rows of the image lie as [steps][3 pieces][classes][rows][pixels][32 terms], with
// zeros beside each row; with strides, rows and columns i with equal i % stride are a class. So the pixels
// that one element of the window meets, for 16 neighbouring results, are a tile, and for the next element
// the same further on. Rows are neighbours too, their zeros shared: tiles run on from one row of results
// into the next, and what a tile computes between two rows is dropped.
//
// A strip is 32 channels of the result, as [KH][steps][KW] steps of columns. Either strips stay in the
// cache as pieces while the rows go by, or rows stay while strips go by. What several threads need each of
// them splits: to fetch pieces from another core takes longer.
//
// A kernel is a struct K as in korch_conv.h, whose last layer is DENSE with NV * W == 32, and a struct S with
//   SKIP, WIDTH          for a window of one column, every SKIP-th is kept; the number kept
//   STRIDE               pixels between those of neighbouring results; classes of columns
//   PITCH, EXTRA         pixels of a row with its zeros, and zeros after the last
//   CLASSES, DEPTH       classes of rows, and rows of one
//   BLOCK, CHUNKS, PARTS rows of the result computed together; separate tasks of rows, or of channels
//   GROUP                strips that stay in the cache; 0 if it is the rows that stay
//   UNITS                steps of a strip that are multiplied at a time, if strips go by
//   IMAGE                numbers of pieces of a block's rows, with what a last tile reads beyond
//   FLOATS               workspace of a thread
#pragma once

#include "korch_amx.h"
#include "korch_conv.h"

namespace korch_conv {

using korch_amx::EDGE;
using korch_amx::TERMS;
using korch_amx::TURNS;

inline constexpr long PIXELS = 2 * EDGE, CHANNELS = 2 * EDGE;  // of a block of sums

template <class K, class S>
struct Split {
  typedef Layer<K, LAST_LAYER<K>> A;
  static_assert(A::NV * K::W == CHANNELS && K::W == EDGE);
  static constexpr long STEPS = blocks(A::C, TERMS), REST = A::C % TERMS, UNITS = A::KH * STEPS * A::KW;
  static constexpr long ACROSS = S::PITCH / S::STRIDE;  // from a result to the one below
  static constexpr long COLUMNS = (S::DEPTH * ACROSS + blocks(S::EXTRA, S::STRIDE)) * TERMS;  // a class of them
  static constexpr long PLANE = S::STRIDE * COLUMNS, PIECE = S::CLASSES * PLANE;
  static constexpr long STRIP = UNITS * korch_amx::STEP;
  // Kept columns that are neighbours in the image.
  static constexpr long RUN = least(S::WIDTH, blocks(K::RUN, S::SKIP));
  static constexpr long RUN_END = larger(RUN, least(S::WIDTH, blocks(K::RUN_END, S::SKIP)));
  static constexpr long BEYOND = (A::KH - 1) * A::DH / A::SH;  // rows of a class beyond those of the result

  // Where a column of a row is.
  static constexpr long place(long x) { return x % S::STRIDE * COLUMNS + x / S::STRIDE * TERMS; }

  // Where the pixels are that a step of a strip meets.
  struct Offsets {
    int32_t at[UNITS];
  };
  static constexpr Offsets offsets() {
    Offsets found{};
    for (long u = 0; u < UNITS; ++u) {
      const long x = u % A::KW * A::DW, step = u / A::KW % STEPS, y = u / (A::KW * STEPS) * A::DH;
      found.at[u] = step * 3 * PIECE + y % A::SH * PLANE + y / A::SH * ACROSS * TERMS + place(x);
    }
    return found;
  }
  static constexpr Offsets OFFSETS = offsets();

  // The rows of a class beyond those of the result, and one; 0 if none is read.
  static constexpr long reach(long kind) {
    long found = 0;
    for (long y = 0; y < A::KH; ++y)
      if (y * A::DH % A::SH == kind) found = y * A::DH / A::SH + 1;
    return found;
  }
};

template <class K, class S>
struct PixelRows {
  const uint16_t* from;
  const int32_t* at;
  static constexpr long STRIDE = TERMS * 2;
  KORCH_INLINE const uint16_t* tile(long step, long piece, long tile) const {
    return from + at[step] + piece * Split<K, S>::PIECE + tile * (EDGE * TERMS);
  }
};

// Where terms from step `step` on of a pixel of the image begin.
template <class K>
KORCH_INLINE const float* pixel(const float* x, long row, long column, long step) {
  if constexpr (K::FORM == LAST) return x + (row * K::WIDTH + column) * K::C + step * TERMS;
  else return x + ((step * (TERMS / K::W) * K::H + row) * K::WIDTH + column) * K::W;
}

template <class K, class S>
KORCH_INLINE void split_pixel(const float* from, bool is_edge, uint16_t* to) {
  typedef Split<K, S> P;
  korch_amx::Floats low, high = {};
  if constexpr (K::FORM == LAST) {
    float edge[TERMS] = {};
    if (P::REST != 0 && is_edge) {
      for (long i = 0; i < P::REST; ++i) edge[i] = from[i];
      from = edge;
    }
    low = load<float, 16>(from);
    high = load<float, 16>(from + EDGE);
  } else {
    low = load<float, 16>(from);
    if (P::REST == 0 || !is_edge) high = load<float, 16>(from + K::H * K::WIDTH * K::W);
  }
  korch_amx::split(low, high, to, P::PIECE);
}

// What of the image a block of results needs, as pieces: made a pixel's step at a time, while products
// are computed. A run is a row of a step; of a channels-last image, of all steps, as it lies.
template <class K, class S>
struct Rows {
  typedef Split<K, S> P;
  typedef typename P::A A;
  static constexpr long INNER = K::FORM == LAST ? P::STEPS : 1, OUTER = P::STEPS / INNER;
  static constexpr long PIXEL = (K::FORM == LAST ? K::C : K::W) * S::SKIP, STEP = 3 * P::PIECE;
  static constexpr long AHEAD = K::FORM == LAST ? 8 * TERMS : 8 * PIXEL;
  const float* x;
  uint16_t* to;
  long first, rows;   // of the result
  long run, runs;     // the next run, and all
  long each;          // how many to make beside four products of tiles
  const float* from;  // of the run that has begun
  uint16_t* at;
  long column, left, step, inner;

  KORCH_INLINE Rows(const float* x, uint16_t* to, long first, long rows)
      : x(x), to(to), first(first), rows(rows), run(0), runs((rows + P::BEYOND) * S::CLASSES * OUTER),
        each(0), left(0) {}

  static KORCH_INLINE bool is_edge(long step) { return P::REST != 0 && step == P::STEPS - 1; }

  static KORCH_INLINE void fill(uint16_t* line, float value, long begin, long end) {
    const korch_amx::Floats all = splat<float, 16>(value);
    for (long s = 0; s < INNER; ++s)
      for (long x = begin; x < end; ++x) korch_amx::split(all, all, line + s * STEP + P::place(x), P::PIECE);
  }

  // Begin a run: write all of it but the columns that are neighbours.
  KORCH_ALONE void begin() {
    const long kind = run / OUTER % S::CLASSES, i = run / (OUTER * S::CLASSES);
    step = run++ % OUTER;
    if (i >= rows - 1 + P::reach(kind)) return;
    uint16_t* const line = to + step * STEP + kind * P::PLANE + i * P::ACROSS * TERMS;
    const long y = (first + i) * A::SH + kind - A::TOP;
    const long row = y < 0 || y >= A::H ? -2 : K::row(y);
    if (row == -2) {
      fill(line, 0.0f, 0, S::PITCH + S::EXTRA);
      return;
    }
    fill(line, 0.0f, 0, A::LEFT);
    fill(line, 0.0f, A::LEFT + S::WIDTH, S::PITCH + S::EXTRA);
    const auto others = [&](long begin, long end) {
      for (long c = begin; c < end; ++c) {
        const long column = row < 0 ? row : K::column(c * S::SKIP), place = A::LEFT + c;
        if (column < 0) fill(line, column == -1 ? K::FILL : 0.0f, place, place + 1);
        else
          for (long s = 0; s < INNER; ++s)
            split_pixel<K, S>(pixel<K>(x, row, column, step + s), is_edge(step + s), line + s * STEP + P::place(place));
      }
    };
    if (row < 0) {
      others(0, S::WIDTH);
      return;
    }
    others(0, P::RUN);
    others(P::RUN_END, S::WIDTH);
    from = pixel<K>(x, row, P::RUN * S::SKIP + K::SHIFT, step);
    at = line, column = A::LEFT + P::RUN;
    left = (P::RUN_END - P::RUN) * INNER;
    inner = 0;
  }

  KORCH_INLINE void make(long count) {
    while (count > 0) {
      if (left == 0) {
        if (run == runs) return;
        begin();
        continue;
      }
      const long now = smaller(count, left);
      const float* own = from;
      uint16_t* const line = at;
      long s = inner, c = column;
      for (long i = 0; i < now; ++i) {
        __builtin_prefetch(own + AHEAD);
        __builtin_prefetch(own + AHEAD + (K::FORM == LAST ? EDGE : K::H * K::WIDTH * K::W));
        split_pixel<K, S>(own, is_edge(INNER > 1 ? s : step), line + s * STEP + P::place(c));
        own += TERMS;
        if (++s == INNER) s = 0, own += PIXEL - INNER * TERMS, ++c;
      }
      from = own, column = c, inner = s, left -= now, count -= now;
    }
  }
  KORCH_ALONE void make_all() { make(runs * INNER * S::WIDTH); }
  KORCH_INLINE void pace(long count) {
    each = blocks(runs * INNER * S::WIDTH, count * P::UNITS * TURNS);
  }
};

// Steps of a strip of layer A as pieces: made a pair of terms at a time.
template <class A>
struct Columns {
  static constexpr long STEPS = blocks(A::C, TERMS), REST = A::C % TERMS;
  const float* strip;
  uint16_t* to;
  long unit, end, part;  // the next step and what is done of it
  long each;

  KORCH_INLINE Columns(const float* strip, uint16_t* to, long unit, long end)
      : strip(strip), to(to), unit(unit), end(end), part(0), each(0) {}

  KORCH_INLINE void make(long count) {
    constexpr long HALF = EDGE * CHANNELS;
    long u = unit, p = part;
    uint16_t* place = to;
    for (; count > 0 && u < end; --count) {
      const long tap = u / (A::KW * STEPS) * A::KW + u % A::KW, term = u / A::KW % STEPS * TERMS + p;
      const float* const from = strip + (tap * A::C + term) * CHANNELS;
#pragma GCC unroll 2
      for (long t = 0; t < 2; ++t) {
        __builtin_prefetch(from + 2 * HALF + t * EDGE);
        __builtin_prefetch(from + 3 * HALF + t * EDGE);
        korch_amx::Floats low = {}, high = {};
        if (REST == 0 || term < A::C) low = load<float, 16>(from + t * EDGE);
        if (REST == 0 || term + EDGE < A::C) high = load<float, 16>(from + HALF + t * EDGE);
        korch_amx::split(low, high, place + t * korch_amx::TILE + p * TERMS, 2 * korch_amx::TILE);
      }
      if (++p == EDGE) p = 0, ++u, place += korch_amx::STEP;
    }
    unit = u, part = p, to = place;
  }
  KORCH_ALONE void make_all() { make((end - unit) * EDGE); }
  KORCH_INLINE void pace(long count, long units) {
    each = blocks((end - unit) * EDGE, count * units * TURNS);
  }
};

template <class A>
KORCH_INLINE const float* strip_of(const Task& t, long strip) {
  return static_cast<const float*>(t.buffers[A::WEIGHTS]) + strip * (A::KH * A::KW * A::C * CHANNELS);
}

// A pixel's sums of a strip from float32 numbers, for what has no pieces.
template <class K>
KORCH_ALONE void sum_again(const Task& t, long y, long x, long number, float* sums) {
  typedef Layer<K, LAST_LAYER<K>> A;
  const float* const strip = strip_of<A>(t, number);
  V<K> sum[A::NV] = {};
  const Span span = taps<A>(y);
  for (long ky = span.first; ky < span.last; ++ky) {
    const long row = K::row(y * A::SH - A::TOP + ky * A::DH);
    for (long kx = 0; kx < A::KW; ++kx) {
      const long at = x * A::SW - A::LEFT + kx * A::DW;
      const long column = at < 0 || at >= A::WIDTH ? -2 : row < 0 ? row : K::column(at);
      for (long c = 0; c < A::C; ++c) {
        float value = column == -1 ? K::FILL : 0.0f;
        if (column >= 0) value = pixel<K>(static_cast<const float*>(t.x), row, column, c / TERMS)[K::FORM == LAST ? c % TERMS : c % TERMS / K::W * (K::H * K::WIDTH * K::W) + c % K::W];
        for (long k = 0; k < A::NV; ++k)
          sum[k] += splat<float, K::W>(value) * load<float, K::W>(strip + ((ky * A::KW + kx) * A::C + c) * CHANNELS + k * K::W);
      }
    }
  }
  for (long k = 0; k < A::NV; ++k) store<float, K::W>(sums + k * K::W, sum[k]);
}

// A row of the result from float32 numbers.
template <class K>
KORCH_ALONE void all_again(const Task& t, long y, long strips) {
  typedef Layer<K, LAST_LAYER<K>> A;
  alignas(64) float sums[CHANNELS];
  for (long x = 0; x < A::OUT_WIDTH; ++x)
    for (long strip = 0; strip < strips; ++strip) {
      sum_again<K>(t, y, x, strip, sums);
      for (long k = 0, channel = strip * CHANNELS; k < A::NV && channel < A::N; ++k, channel += K::W)
        put<K, LAST_LAYER<K>>(t, load<float, K::W>(sums + k * K::W), y, x, channel);
    }
}

template <class K, class S>
KORCH_INLINE long results(long rows) {
  return (rows - 1) * Split<K, S>::ACROSS + Split<K, S>::A::OUT_WIDTH;
}

// Sums of a strip that are to be finished and stored, while the next are computed: of layer L, whose
// rows are ACROSS pixels apart. AGAIN computes a pixel's sums from float32 numbers.
template <class K, int L, long ACROSS, void (*AGAIN)(const Task&, long, long, long, float*)>
struct Pending {
  typedef Layer<K, L> A;
  const float* sums;
  long y, x, left, strip;
  long each;  // pixels beside four products of tiles

  // `count` pixels from number q on of the block of rows that begins at row `first`.
  KORCH_INLINE void set(const float* from, long first, long q, long count, long of, long calls) {
    sums = from, y = first + q / ACROSS, x = q % ACROSS, left = count, strip = of;
    each = blocks(PIXELS, calls);
  }
  KORCH_INLINE void finish(const Task& t, long count) {
    const float* own = sums;
    long i = smaller(count, left), row = y, column = x;
    left -= i;
    while (i > 0) {
      if (column == ACROSS) column = 0, ++row;
      const long run = smaller(i, ACROSS - column);
      finish_row(t, own, row, column, smaller(run, A::OUT_WIDTH - column));
      own += run * CHANNELS, column += run, i -= run;
    }
    sums = own, y = row, x = column;
  }

  // `count` neighbours in a row; none if it is negative.
  KORCH_INLINE void finish_row(const Task& t, const float* own, long row, long column, long count) const {
    if (count <= 0) return;
    Target to[A::NV];
    for (long k = 0; k < A::NV; ++k) to[k] = target<K, L>(t, row, column, strip * CHANNELS + k * K::W);
    for (long i = 0; i < count; ++i, own += CHANNELS) {
      const float* from = own;
      alignas(64) float again[CHANNELS];
      if (!korch_amx::are_finite(own, CHANNELS)) {
        AGAIN(t, row, column + i, strip, again);
        from = again;
      }
#pragma GCC unroll 2
      for (long k = 0; k < A::NV; ++k) {
        const long channel = strip * CHANNELS + k * K::W;
        if (A::N % CHANNELS == 0 || channel < A::N)
          put<K, L>(t, load<float, K::W>(from + k * K::W), to[k], i, channel);
      }
    }
  }
};
template <class K, class S>
using LonePending = Pending<K, LAST_LAYER<K>, Split<K, S>::ACROSS, sum_again<K>>;

// What the vector units do beside four products of tiles.
template <class Next, class Rest>
KORCH_ALONE void work_beside(const Task& t, Next& next, Rest& pending) {
  next.make(next.each);
  if (pending.left > 0) pending.finish(t, pending.each);
}

template <int R, class Rows, class Next, class Rest>
KORCH_ALONE void multiply_pixels(const Task& t, Rows rows, const uint16_t* b, long units, float* sums, bool adds,
                                 Next& next, Rest& pending) {
  korch_amx::multiply_tiles<R>(rows, b, units, sums, adds, [&]() __attribute__((always_inline)) {
    if (next.each > 0 || pending.left > 0) work_beside(t, next, pending);
  });
}
template <class Rows, class Next, class Rest>
KORCH_INLINE void multiply(const Task& t, Rows rows, const uint16_t* b, long units, long pixels, float* sums, bool adds,
                           Next& next, Rest& pending) {
  if (pixels > EDGE) multiply_pixels<2>(t, rows, b, units, sums, adds, next, pending);
  else multiply_pixels<1>(t, rows, b, units, sums, adds, next, pending);
  pending.finish(t, PIXELS);
}

// Rows [y, last) of the result, of strips that stay, a group at a time.
template <class K, class S>
inline void pass_rows(const Task& t, long y, long last) {
  typedef Split<K, S> P;
  uint16_t* const strips = reinterpret_cast<uint16_t*>(t.work);
  for (long strip = t.first; strip < t.last; strip += S::GROUP) {
    const long count = smaller(S::GROUP, t.last - strip);
    for (long s = 0; s < count; ++s)
      Columns<typename P::A>(strip_of<typename P::A>(t, strip + s), strips + s * P::STRIP, 0, P::UNITS).make_all();
    uint16_t *rows = strips + S::GROUP * P::STRIP, *other = rows + S::IMAGE;
    Rows<K, S>(static_cast<const float*>(t.x), rows, y, smaller(S::BLOCK, last - y)).make_all();
    alignas(64) float sums[2][PIXELS * CHANNELS];
    long turn = 0;
    LonePending<K, S> pending{};
    for (long from = y; from < last; from += S::BLOCK) {
      const long all = results<K, S>(smaller(S::BLOCK, last - from)), after = from + S::BLOCK;
      Rows<K, S> next(static_cast<const float*>(t.x), other, after, smaller(S::BLOCK, last - after));
      if (after >= last) next.runs = 0;
      else next.pace(blocks(all, PIXELS) * count);
      for (long q = 0; q < all; q += PIXELS)
        for (long s = 0; s < count; ++s) {
          const long pixels = smaller(PIXELS, all - q);
          float* const own = sums[turn++ % 2];
          multiply(t, PixelRows<K, S>{rows + q * TERMS, P::OFFSETS.at}, strips + s * P::STRIP, P::UNITS, pixels, own, false, next, pending);
          pending.set(own, from, q, pixels, strip + s, P::UNITS * TURNS);
        }
      next.make_all();
      uint16_t* const done = rows;
      rows = other, other = done;
    }
    pending.finish(t, PIXELS);
  }
}

// Rows from `from` on of the result, whose pieces stay, while strips go by.
template <class K, class S>
inline void pass_strips(const Task& t, long from, long last) {
  typedef Split<K, S> P;
  constexpr bool KEEPS_SUMS = S::UNITS < P::UNITS;
  uint16_t* const rows = reinterpret_cast<uint16_t*>(t.work);
  uint16_t *columns = rows + S::IMAGE, *other = columns + S::UNITS * korch_amx::STEP;
  float* const kept = reinterpret_cast<float*>(other + S::UNITS * korch_amx::STEP);
  const long all = results<K, S>(last - from);
  Rows<K, S>(static_cast<const float*>(t.x), rows, from, last - from).make_all();
  alignas(64) float lone[2][PIXELS * CHANNELS];
  long turn = 0;
  LonePending<K, S> pending{};
  Columns<typename P::A>(strip_of<typename P::A>(t, t.first), columns, 0, S::UNITS).make_all();
  for (long strip = t.first; strip < t.last; ++strip)
    for (long unit = 0; unit < P::UNITS; unit += S::UNITS) {
      const long units = smaller(S::UNITS, P::UNITS - unit);
      const bool is_done = unit + units == P::UNITS;
      const long begin = is_done ? 0 : unit + units;
      Columns<typename P::A> next(strip_of<typename P::A>(t, is_done ? strip + 1 : strip), other, begin, smaller(begin + S::UNITS, P::UNITS));
      if (is_done && strip + 1 == t.last) next.end = begin;
      next.pace(blocks(all, PIXELS), units);
      for (long q = 0; q < all; q += PIXELS) {
        float* const sums = KEEPS_SUMS ? kept + q * CHANNELS : lone[turn++ % 2];
        const long pixels = smaller(PIXELS, all - q);
        multiply(t, PixelRows<K, S>{rows + q * TERMS, P::OFFSETS.at + unit}, columns, units, pixels, sums, unit > 0, next, pending);
        if (is_done) pending.set(sums, from, q, pixels, strip, units * TURNS);
      }
      next.make_all();
      uint16_t* const done = columns;
      columns = other, other = done;
    }
  pending.finish(t, PIXELS);
}

template <class K, class S>
inline int run_split(void* const* buffers, const float* x, float* workspace) {
  typedef Split<K, S> P;
  typedef typename P::A A;
  constexpr long STRIPS = blocks(A::N, CHANNELS);
  const bool is_ready = korch_amx::is_ready();
  const auto task = [&](long image, long part) {
    return Task{buffers, x + image * (K::C * K::H * K::WIDTH), workspace + omp_get_thread_num() * S::FLOATS, image,
                STRIPS * part / S::PARTS, STRIPS * (part + 1) / S::PARTS, nullptr};
  };
#pragma omp parallel num_threads(K::THREADS) if (K::THREADS > 1)
  if (!is_ready) {  // the system doesn't let us use the units
#pragma omp for schedule(static)
    for (long i = 0; i < K::IMAGES * A::OUT_H; ++i) all_again<K>(task(i / A::OUT_H, 0), i % A::OUT_H, STRIPS);
  } else {
    korch_amx::begin();
    if constexpr (S::GROUP > 0) {
#pragma omp for schedule(static)
      for (long i = 0; i < K::IMAGES * S::CHUNKS * S::PARTS; ++i) {
        const long part = i % S::PARTS, chunk = i / S::PARTS % S::CHUNKS;
        pass_rows<K, S>(task(i / (S::PARTS * S::CHUNKS), part), A::OUT_H * chunk / S::CHUNKS,
                        A::OUT_H * (chunk + 1) / S::CHUNKS);
      }
    } else {
#pragma omp for schedule(static)
      for (long i = 0; i < K::IMAGES * S::PARTS; ++i) {
        const Task own = task(i / S::PARTS, i % S::PARTS);
        for (long from = 0; from < A::OUT_H; from += S::BLOCK)
          pass_strips<K, S>(own, from, smaller(from + S::BLOCK, A::OUT_H));
      }
    }
    korch_amx::end();
  }
  return 0;
}

}  // namespace korch_conv
