// Chains of convolutions whose pointwise ones are multiplied by the matrix units (korch_amx.h).
//
// Two tiles of 16 pixels, each within a row of the result, are multiplied by all strips of 32 channels,
// whose pieces stay in the cache. Meanwhile the vector units make the pieces of the next two tiles: what is
// read is split, and a depthwise layer before is computed just for that. Sums are finished at once: where
// vector units have this much to do, it takes no less time beside products, for these and float32 arithmetic
// hardly overlap (measured on Granite Rapids), and later the sums lie farther away.
//
// A kernel is a struct K as in korch_conv.h, with some layers that have TILES and whose workspaces begin
// with the pieces of twice 32 pixels and have those of the weights at PIECES: to share them between
// threads takes longer than to make them twice.
#pragma once

#include "korch_amx.h"
#include "korch_conv.h"

namespace korch_conv {

using korch_amx::EDGE;
using korch_amx::TERMS;
using korch_amx::TURNS;

inline constexpr long PIXELS = 2 * EDGE, CHANNELS = 2 * EDGE;  // of a block of sums

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
};

template <class A>
KORCH_INLINE const float* strip_of(const Task& t, long strip) {
  return static_cast<const float*>(t.buffers[A::WEIGHTS]) + strip * (A::KH * A::KW * A::C * CHANNELS);
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

template <class K, int L>
struct Tiles {
  typedef Layer<K, L> A;
  static constexpr long STEPS = blocks(A::C, TERMS), STRIPS = blocks(A::N, CHANNELS);
  static constexpr long ACROSS = blocks(A::OUT_WIDTH, EDGE) * EDGE;  // from a result to the one below
  static constexpr long STRIP = STEPS * korch_amx::STEP;
  static KORCH_INLINE long first(const Task& t) { return A::SPLIT ? t.first / CHANNELS : 0; }
  static KORCH_INLINE long last(const Task& t) { return A::SPLIT ? blocks(t.last, CHANNELS) : STRIPS; }
  static constexpr bool IS_FED = L > 0 && is_fed<K, larger(L - 1, 0)>();
};

// Where the pieces of a layer's weights begin.
template <class K, int L>
constexpr long pieces_at() {
  if constexpr (L == 0) return 0;
  else return pieces_at<K, L - 1>() + (Layer<K, L - 1>::TILES ? Tiles<K, L - 1>::STRIPS * Tiles<K, L - 1>::STRIP : 0);
}

// Fetch what R results of the next row read first of the image, of NV vectors of channels: caches don't
// foresee it where tiles of all channels take turns.
template <class K, int L, int R, int NV>
KORCH_INLINE void fetch_below(const Task& t, long y, long x, long channel) {
  typedef Layer<K, L> A;
  typedef Source<K, L> S;
  if constexpr (L == 0) {
    const long row = (y + 1) * A::SH - A::TOP + (A::KH - 1) * A::DH;
    if (row >= A::H) return;
#pragma GCC unroll 4
    for (long above = 0; above < A::SH; ++above) {
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const long c = channel + k * K::W;
        const float* const from = S::row(t, row - above) + x * A::SW * S::PIXEL + c / S::PIXEL * S::STEP + c % S::PIXEL;
#pragma GCC unroll 32
        for (int r = 0; r < R * A::SW; ++r) __builtin_prefetch(from + r * S::PIXEL, 0, 2);
      }
    }
  }
}

// What NV vectors of channels of R pixels are that layer L reads.
template <class K, int L, int R, int NV, bool IS_EDGE>
KORCH_INLINE void inputs(const Task& t, long y, long x, long channel, V<K> (&value)[R][NV]) {
  if constexpr (Tiles<K, L>::IS_FED) {
    fetch_below<K, L - 1, R, NV>(t, y, x, channel);
    V<K> sum[R][NV] = {};
    depthwise_sums<K, L - 1, R, NV, IS_EDGE>(t, y, x, channel, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k)
        value[r][k] = Layer<K, L - 1>::template finish<K::W>(t.buffers, sum[r][k], 0, channel + k * K::W);
  } else {
    typedef Source<K, L> S;
    const float* const row = S::row(t, y) + x * S::PIXEL;
#pragma GCC unroll 2
    for (int k = 0; k < NV; ++k) {
      const long c = channel + k * K::W;
      const float* const from = row + c / S::PIXEL * S::STEP + c % S::PIXEL;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) value[r][k] = load<float, K::W>(from + r * S::PIXEL);
    }
  }
}

// The pieces of what 32 results read, made some pixels of a step at a time.
template <class K, int L>
struct Feed {
  typedef Layer<K, L> A;
  typedef Tiles<K, L> P;
  static constexpr long PART = 8, PARTS = PIXELS / PART * P::STEPS;
  const Task& t;
  const long first, all;  // row of the first result, and results with what is between rows
  uint16_t* to = nullptr;
  long q = 0, part = PARTS;        // the first of the results, and the part that is next
  long each = 0, turn = 0, turns;  // `each` per call; a part for `turns` of them

  // Split the results from number `from` on, in the course of `calls` calls.
  KORCH_INLINE void set(long from, uint16_t* place, long calls) {
    q = from, to = place, part = from < all ? 0 : PARTS, turn = 0, turns = calls;
    each = from < all ? PARTS : 0;
  }
  KORCH_INLINE void make(long count) {
    for (turn += count; turn >= turns && part < PARTS; turn -= turns) make_part();
  }
  KORCH_INLINE void make_all() {
    while (part < PARTS) make_part();
  }
  KORCH_INLINE void make_part() {
    constexpr int TAIL = A::OUT_WIDTH % PART;
    const long step = part / (PIXELS / PART), i = part % (PIXELS / PART) * PART, at = q + i;
    ++part;
    const long y = first + at / P::ACROSS, x = at % P::ACROSS;
    if (at >= all || x >= A::OUT_WIDTH) return;  // what this gives is dropped
    uint16_t* const place = to + step * korch_amx::STEP + i / EDGE * korch_amx::TILE + i % EDGE * TERMS;
    if (TAIL == 0 || x + PART <= A::OUT_WIDTH) make_pixels<PART>(y, x, step, place);
    else make_pixels<TAIL == 0 ? 1 : TAIL>(y, x, step, place);
  }
  template <int R>
  KORCH_INLINE void make_pixels(long y, long x, long step, uint16_t* place) {
    const bool is_half = A::C % TERMS != 0 && step == P::STEPS - 1;
    bool is_edge = false;
    if constexpr (P::IS_FED) is_edge = x < Inside<K, L - 1>::FIRST || x + R > Inside<K, L - 1>::END;
    if (is_half) split_pixels<R, 1, P::IS_FED>(t, y, x, step, place);
    else if (is_edge) split_pixels<R, 2, true>(t, y, x, step, place);
    else split_pixels<R, 2, false>(t, y, x, step, place);
  }
  template <int R, int NV, bool IS_EDGE>
  static KORCH_ALONE void split_pixels(const Task& t, long y, long x, long step, uint16_t* place) {
    V<K> value[R][NV];
    inputs<K, L, R, NV, IS_EDGE>(t, y, x, step * TERMS, value);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      korch_amx::split(value[r][0], NV > 1 ? value[r][NV - 1] : V<K>{}, place + r * TERMS, 2 * korch_amx::TILE);
  }
};

// What is left to finish beside products, where sums are finished at once.
struct Nothing {
  static constexpr long left = 0, each = 0;
  KORCH_INLINE void finish(const Task&, long) {}
};

// A pixel's sums of a strip from float32 numbers, for what has no pieces.
template <class K, int L>
KORCH_ALONE void pixel_again(const Task& t, long y, long x, long strip, float* sums) {
  typedef Layer<K, L> A;
  const float* w = strip_of<A>(t, strip);
  V<K> sum[A::NV] = {};
  for (long channel = 0; channel < A::C; channel += K::W) {
    V<K> value[1][1];
    inputs<K, L, 1, 1, true>(t, y, x, channel, value);
    for (int c = 0; c < K::W; ++c, w += CHANNELS)
      for (long k = 0; k < A::NV; ++k) sum[k] += splat<float, K::W>(value[0][0][c]) * load<float, K::W>(w + k * K::W);
  }
  for (long k = 0; k < A::NV; ++k) store<float, K::W>(sums + k * K::W, sum[k]);
}

// Rows [from, to) of a pointwise layer.
template <class K, int L>
inline void dense_tiles(const Task& t, long from, long to) {
  typedef Layer<K, L> A;
  typedef Tiles<K, L> P;
  uint16_t *rows = reinterpret_cast<uint16_t*>(t.work), *other = rows + P::STRIP;
  const uint16_t* const columns = t.pieces + pieces_at<K, L>();
  const long begin = P::first(t), end = P::last(t);
  alignas(64) float sums[PIXELS * CHANNELS];
  if (t.pieces == nullptr) {  // the system doesn't let us use the units
    for (long y = from; y < to; ++y)
      for (long x = 0; x < A::OUT_WIDTH; ++x)
        for (long strip = begin; strip < end; ++strip) {
          pixel_again<K, L>(t, y, x, strip, sums);
          for (long k = 0, channel = strip * CHANNELS; k < A::NV && channel < A::N; ++k, channel += K::W)
            put<K, L>(t, load<float, K::W>(sums + k * K::W), y, x, channel);
        }
    return;
  }
  Nothing nothing;
  Feed<K, L> feed{t, from, (to - from) * P::ACROSS};
  feed.set(0, rows, 1);
  feed.make_all();
  for (long q = 0; q < feed.all; q += PIXELS) {
    feed.set(q + PIXELS, other, (end - begin) * P::STEPS * TURNS);
    for (long strip = begin; strip < end; ++strip) {
      const long pixels = smaller(PIXELS, feed.all - q);
      multiply(t, korch_amx::Block{rows}, columns + strip * P::STRIP, P::STEPS, pixels, sums, false, feed, nothing);
      Pending<K, L, P::ACROSS, pixel_again<K, L>> done{};
      done.set(sums, from, q, pixels, strip, 1);
      done.finish(t, PIXELS);
    }
    feed.make_all();
    uint16_t* const done = rows;
    rows = other, other = done;
  }
}

// Split the weights of the strips that a task multiplies by.
template <class K, int L = 0>
KORCH_INLINE void split_weights(const Task& t, uint16_t* pieces) {
  typedef Layer<K, L> A;
  if constexpr (A::TILES) {
    typedef Tiles<K, L> P;
    for (long strip = P::first(t); strip < P::last(t); ++strip)
      Columns<A>(strip_of<A>(t, strip), pieces + pieces_at<K, L>() + strip * P::STRIP, 0, P::STEPS).make_all();
  }
  if constexpr (L < LAST_LAYER<K>) split_weights<K, L + 1>(t, pieces);
}

template <class K>
inline int run_tiles(void* const* buffers, const typename K::Element* x, float* workspace) {
#pragma omp parallel for num_threads(K::THREADS) schedule(static) if (K::THREADS > 1)
  for (long task = 0; task < K::IMAGES * K::CHUNKS * K::PARTS; ++task) {
    Task t = task_of<K>(buffers, x, workspace, task, omp_get_thread_num());
    uint16_t* const pieces = reinterpret_cast<uint16_t*>(t.work + K::PIECES);
    if (korch_amx::is_ready()) {
      split_weights<K>(t, pieces);
      t.pieces = pieces;
      korch_amx::begin();
    }
    run_task<K>(t, task);
    if (t.pieces != nullptr) korch_amx::end();
  }
  return 0;
}

}  // namespace korch_conv
