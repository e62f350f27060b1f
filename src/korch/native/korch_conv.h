// Convolutions, one or a chain of them, computed some rows at a time: what stands between two of them
// is kept in a ring of rows that stays in a core's cache.
//
// A kernel is a struct K with
//   W                    lanes of a vector: channels that are handled together
//   Layers               Chain<L0, L1, ...>, its layers in order
//   FORM                 how the image lies: LAST (channels-last) or BLOCKED (blocks of W channels)
//   OUT_LAST             whether the result is channels-last, or in blocks of W channels
//   Element, Result      of the image and of the first result: float, or one of 16 bits; an image of 16
//                        bits is read by a COPY, which widens it
//   IMAGES, C, H, WIDTH  of the image
//   BLOCK                rows of the result that are computed together
//   CHUNKS, PARTS        parts of the result's rows, and of its channels, that are separate tasks
//   UNIT                 channels of which a part is a multiple
//   FLOATS               workspace of a thread; THREADS
//   row(i), column(i)    where a COPY reads its row or column i of the image, -1 for FILL, -2 for zero
//   OUTPUT               which buffer has the first result
//   RUN, RUN_END, SHIFT  columns RUN <= i < RUN_END are those at i + SHIFT
//   FILL                 the value of pads
// and a layer is a struct with
//   KIND                 COPY: the image as it is read; DENSE: all channels into each; DEPTHWISE: each into its own
//   C, H, WIDTH          what it reads; N, OUT_H, OUT_WIDTH: what it writes
//   KH, KW, SH, SW, DH, DW, TOP, LEFT   window, strides, dilations, zeros before rows and columns
//   NV, ROWS             vectors of channels, and pixels of a row, that are computed together in registers
//   SPLIT                whether it computes only the channels of its task's part
//   TILES                whether matrix units multiply (korch_conv_chain_amx.h): then NV * W == 32, its window
//                        is one element, and a DEPTHWISE layer before it has no ring
//   RING, LINE, MARGIN   rows of its ring, pixels of one with its zeros, zeros on the left
//   PIXEL                channels that are neighbours in the ring: W, or as in the image, 1 or all
//   AT                   where its ring begins in the workspace
//   WEIGHTS              which buffer has its weights: DENSE [N / (NV * W)][KH][KW][C][NV * W],
//                        DEPTHWISE [N / W][KH][KW][W]
//   finish<L>(buffers, y, at, channel)   what is done with L results; of the last layer, stores them
#pragma once

#include "korch_conv_task.h"

namespace korch_conv {

// R pixels times NV vectors of channels.
template <class K, int L, int R>
KORCH_ALONE void dense_tile(const Task& task, const float* strip, Span span, long y, long x, long channel) {
  typedef Layer<K, L> A;
  typedef Source<K, L> S;
  constexpr long COLUMNS = A::NV * K::W;
  constexpr long TERMS = least(S::PIXEL, A::C), STEPS = blocks(A::C, S::PIXEL);
  const Task t = task;  // what is stored can't change it
  V<K> sum[R][A::NV] = {};
  for (long ky = span.first; ky < span.last; ++ky) {
    const float* line = S::row(t, y * A::SH - A::TOP + ky * A::DH) + (x * A::SW - S::BEFORE) * S::PIXEL;
    const float* w = strip + ky * (A::KW * A::C * COLUMNS);
    for (long kx = 0; kx < A::KW; ++kx) {
      const float* a = line + kx * (A::DW * S::PIXEL);
      for (long b = 0; b < STEPS; ++b, a += S::STEP) {
        const long terms = A::C % TERMS == 0 ? TERMS : smaller(TERMS, A::C - b * TERMS);
        for (long c = 0; c < terms; ++c, w += COLUMNS) {
          KORCH_APART
          V<K> v[A::NV];
#pragma GCC unroll 8
          for (int k = 0; k < A::NV; ++k) v[k] = load<float, K::W>(w + k * K::W);
#pragma GCC unroll 32
          for (int r = 0; r < R; ++r) {
            V<K> s = splat<float, K::W>(a[r * (A::SW * S::PIXEL) + c]);
#pragma GCC unroll 8
            for (int k = 0; k < A::NV; ++k) sum[r][k] += s * v[k];
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < A::NV; ++k) {
    if (A::N % COLUMNS != 0 && channel + k * K::W >= A::N) break;
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) put<K, L>(t, sum[r][k], y, x + r, channel + k * K::W);
  }
}

template <class K, int L>
KORCH_INLINE void dense(Task& t, long from, long to) {
  typedef Layer<K, L> A;
  constexpr long COLUMNS = A::NV * K::W;
  constexpr int TAIL = A::OUT_WIDTH % A::ROWS;
  const float* const weights = static_cast<const float*>(t.buffers[A::WEIGHTS]);
  const long end = A::SPLIT ? t.last : A::N;
  for (long channel = first_channel<K, L>(t); channel < end; channel += COLUMNS) {
    const float* const strip = weights + channel * (A::KH * A::KW * A::C);
    for (long y = from; y < to; ++y) {
      const Span span = taps<A>(y);
      long x = 0;
      for (; x + A::ROWS <= A::OUT_WIDTH; x += A::ROWS) dense_tile<K, L, A::ROWS>(t, strip, span, y, x, channel);
      if constexpr (TAIL != 0) dense_tile<K, L, TAIL>(t, strip, span, y, x, channel);
    }
  }
}

// Sums of R pixels of NV vectors of channels. At an edge, columns outside of the image count as zeros; rings
// have these zeros.
template <class K, int L, int R, int NV, bool IS_EDGE>
KORCH_INLINE void depthwise_sums(const Task& t, long y, long x, long channel, V<K> (&sum)[R][NV]) {
  typedef Layer<K, L> A;
  typedef Source<K, L> S;
  const float* const weights = static_cast<const float*>(t.buffers[A::WEIGHTS]) + channel * (A::KH * A::KW);
  const Span span = taps<A>(y);
  const long own = channel - (L > 0 ? first_channel<K, larger(L - 1, 0)>(t) : 0);
  const long at = own / S::PIXEL * S::STEP + own % S::PIXEL;
  constexpr long BESIDE = S::PIXEL > K::W ? K::W : S::STEP;  // from a vector of channels to the next
  const long left = x * A::SW - S::BEFORE;
  // Where there are registers for it, what is read is loaded once for all columns of the window.
  constexpr bool LOADS_ONCE = !IS_EDGE && R * NV + A::KW + 1 < (K::W == 16 ? 32 : 16);
  constexpr long ALL = (R - 1) * A::SW + (A::KW - 1) * A::DW + 1;
  for (long ky = span.first; ky < span.last; ++ky) {
    const float* line = S::row(t, y * A::SH - A::TOP + ky * A::DH) + at + left * S::PIXEL;
    if constexpr (LOADS_ONCE) {
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        V<K> w[A::KW];
#pragma GCC unroll 16
        for (int kx = 0; kx < A::KW; ++kx) w[kx] = load<float, K::W>(weights + ((k * A::KH + ky) * A::KW + kx) * K::W);
#pragma GCC unroll 64
        for (long p = 0; p < ALL; ++p) {
          V<K> x = load<float, K::W>(line + p * S::PIXEL + k * BESIDE);
          KORCH_KEEP(x);
#pragma GCC unroll 16
          for (int kx = 0; kx < A::KW; ++kx) {
            const long q = p - kx * A::DW;
            if (q >= 0 && q % A::SW == 0 && q / A::SW < R) sum[q / A::SW][k] += w[kx] * x;
          }
        }
      }
      continue;
    }
#pragma GCC unroll 8
    for (int kx = 0; kx < A::KW; ++kx) {
      V<K> w[NV];
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) w[k] = load<float, K::W>(weights + ((k * A::KH + ky) * A::KW + kx) * K::W);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const long column = r * A::SW + kx * A::DW;
        if (IS_EDGE && L == 0 && (left + column < 0 || left + column >= A::WIDTH)) continue;
#pragma GCC unroll 2
        for (int k = 0; k < NV; ++k) sum[r][k] += w[k] * load<float, K::W>(line + column * S::PIXEL + k * BESIDE);
      }
    }
  }
}

// Pixels ahead of those that are computed, in memory's order: rows end at pages, where caches don't foresee
// what follows.
inline constexpr long PIXELS_AHEAD = 64;

// Fetch what a tile further on reads first, and where it writes.
template <class K, int L, int R>
KORCH_INLINE void depthwise_ahead(const Task& t, long y, long x, long channel) {
  typedef Layer<K, L> A;
  typedef Source<K, L> S;
  constexpr long STEP = larger(1, 16 / K::W);  // pixels of a line
  if constexpr (L == LAST_LAYER<K> && !K::OUT_LAST) {
    const typename K::Result* const to = results<K>(t) + place<K>(t, y, x + PIXELS_AHEAD, channel);
#pragma GCC unroll 16
    for (long r = 0; r < R; r += STEP) __builtin_prefetch(to + r * K::W, 1);
  }
  if constexpr (L == 0 && S::PIXEL == K::W) {
    const float* const row = S::row(t, y * A::SH - A::TOP + (A::KH - 1) * A::DH) + channel / K::W * S::STEP;
#pragma GCC unroll 32
    for (long r = 0; r < R * A::SW; r += STEP) __builtin_prefetch(row + (x * A::SW + PIXELS_AHEAD + r) * K::W);
  }
}

// R pixels of W channels.
template <class K, int L, int R, bool IS_EDGE>
KORCH_ALONE void depthwise_tile(const Task& task, long y, long x, long channel) {
  const Task t = task;  // what is stored can't change it
  depthwise_ahead<K, L, R>(t, y, x, channel);
  V<K> sum[R][1] = {};
  depthwise_sums<K, L, R, 1, IS_EDGE>(t, y, x, channel, sum);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) put<K, L>(t, sum[r][0], y, x + r, channel);
}

// Pixels whose window is inside of a row; all of them in a ring, which has zeros beside its rows.
template <class K, int L>
struct Inside {
  typedef Layer<K, L> A;
  static constexpr long BEFORE = Source<K, L>::BEFORE, REACH = (A::KW - 1) * A::DW + 1;
  static constexpr long FIRST = L > 0 ? 0 : least(A::OUT_WIDTH, blocks(BEFORE, A::SW));
  static constexpr long FIT = A::WIDTH + BEFORE < REACH ? 0 : (A::WIDTH + BEFORE - REACH) / A::SW + 1;
  static constexpr long END = L > 0 ? A::OUT_WIDTH : larger(FIRST, least(A::OUT_WIDTH, FIT));
};

// A row of W channels.
template <class K, int L>
KORCH_INLINE void depthwise_row(const Task& t, long y, long channel) {
  typedef Layer<K, L> A;
  constexpr long FIRST = Inside<K, L>::FIRST, END = Inside<K, L>::END;
  constexpr int TAIL = (END - FIRST) % A::ROWS;
  long x = 0;
  for (; x < FIRST; ++x) depthwise_tile<K, L, 1, true>(t, y, x, channel);
  for (; x + A::ROWS <= END; x += A::ROWS) depthwise_tile<K, L, A::ROWS, false>(t, y, x, channel);
  if constexpr (TAIL != 0) depthwise_tile<K, L, TAIL, false>(t, y, x, channel);
  for (x = END; x < A::OUT_WIDTH; ++x) depthwise_tile<K, L, 1, true>(t, y, x, channel);
}

template <class K, int L>
KORCH_INLINE void depthwise(const Task& t, long from, long to) {
  typedef Layer<K, L> A;
  const long first = first_channel<K, L>(t), end = A::SPLIT ? t.last : A::N;
  // What is neighbours in memory is computed together: channels of a row, or rows of a channel.
  if constexpr (Source<K, L>::PIXEL > K::W) {
    for (long y = from; y < to; ++y)
      for (long channel = first; channel < end; channel += K::W) depthwise_row<K, L>(t, y, channel);
  } else {
    for (long channel = first; channel < end; channel += K::W)
      for (long y = from; y < to; ++y) depthwise_row<K, L>(t, y, channel);
  }
}

// Whether a layer's results go straight to the matrix units.
template <class K, int L>
constexpr bool is_fed() {
  if constexpr (L == LAST_LAYER<K>) return false;
  else return Layer<K, L>::KIND == DEPTHWISE && Layer<K, L + 1>::TILES;
}
template <class K, int L>
void dense_tiles(const Task& t, long from, long to);

// Compute rows [done[L], end) of layer L, and of those before it what they read.
template <class K, int L>
KORCH_INLINE void advance(Task& t, long* done, long end) {
  typedef Layer<K, L> A;
  if constexpr (L > 0) {
    const long need = smaller(A::H, (end - 1) * A::SH - A::TOP + (A::KH - 1) * A::DH + 1);
    if (need > done[L - 1]) advance<K, L - 1>(t, done, need);
  }
  if constexpr (A::KIND == COPY) copy<K, L>(t, done[L], end);
  if constexpr (A::TILES) dense_tiles<K, L>(t, done[L], end);
  else if constexpr (A::KIND == DENSE) dense<K, L>(t, done[L], end);
  if constexpr (A::KIND == DEPTHWISE && !is_fed<K, L>()) depthwise<K, L>(t, done[L], end);
  done[L] = end;
}

// Say that rows from `start` on are needed of layer L.
template <class K, int L>
KORCH_INLINE void begin(long* done, long start) {
  done[L] = start;
  if constexpr (L > 0) begin<K, L - 1>(done, larger(0, start * Layer<K, L>::SH - Layer<K, L>::TOP));
}

// Write the zeros beside the rows of the rings.
template <class K, int L>
KORCH_INLINE void clear(const Task& t) {
  typedef Layer<K, L> A;
  if constexpr (L < LAST_LAYER<K>) {
    const long count = A::SPLIT ? t.last - t.first : A::N;
    for (long row = 0; row < blocks(count, A::PIXEL) * A::RING; ++row)
      for (long x = 0; x < A::LINE; ++x)
        if (x < A::MARGIN || x >= A::MARGIN + A::OUT_WIDTH)
          for (long c = 0; c < A::PIXEL; ++c) t.work[A::AT + (row * A::LINE + x) * A::PIXEL + c] = 0.0f;
    clear<K, L + 1>(t);
  }
}

template <class K>
KORCH_INLINE Task task_of(void* const* buffers, const typename K::Element* x, float* workspace, long task, long me) {
  typedef Layer<K, LAST_LAYER<K>> A;
  constexpr long UNITS = blocks(A::N, K::UNIT);
  const long part = task % K::PARTS, image = task / (K::PARTS * K::CHUNKS);
  return {buffers, x + image * (K::C * K::H * K::WIDTH),
          workspace + me * K::FLOATS, image,
          UNITS * part / K::PARTS * K::UNIT,
          smaller(UNITS * (part + 1) / K::PARTS * K::UNIT, A::N), nullptr};
}

template <class K>
inline void run_task(Task& t, long task) {
  constexpr int END = LAST_LAYER<K>;
  typedef Layer<K, END> A;
  const long chunk = task / K::PARTS % K::CHUNKS;
  clear<K, 0>(t);
  const long last = A::OUT_H * (chunk + 1) / K::CHUNKS;
  long y = A::OUT_H * chunk / K::CHUNKS;
  long done[K::Layers::COUNT];
  begin<K, END>(done, y);
  while (y < last) {
    y = smaller(y + K::BLOCK, last);
    advance<K, END>(t, done, y);
  }
}

}  // namespace korch_conv
