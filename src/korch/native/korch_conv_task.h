// What one task of a convolution (korch_conv.h) reads and writes: the image, rings of rows between layers, and
// the result.
#pragma once

#include <stdint.h>

#include "korch_half.h"

// Keeps a compiler from loading in one turn of a loop what later ones need: it runs out of registers.
#define KORCH_APART asm volatile("" : : : "memory");

namespace korch_conv {

using korch::blocks;
using korch::load;
using korch::smaller;
using korch::splat;
using korch::store;

enum Kind { COPY, DENSE, DEPTHWISE };
enum Form { LAST, BLOCKED };

template <int L, class First, class... Rest>
struct Pick {
  typedef typename Pick<L - 1, Rest...>::type type;
};
template <class First, class... Rest>
struct Pick<0, First, Rest...> {
  typedef First type;
};
template <class... Layers>
struct Chain {
  static constexpr int COUNT = sizeof...(Layers);
  template <int L>
  using At = typename Pick<L, Layers...>::type;
};

template <class K, int L>
using Layer = typename K::Layers::template At<L>;
template <class K>
using V = korch::Vec<float, K::W>;
template <class K>
inline constexpr int LAST_LAYER = K::Layers::COUNT - 1;

struct Task {
  void* const* buffers;
  const void* x;      // of this task's image
  float* work;
  long image, first, last;  // channels of the part
  const uint16_t* pieces;  // of the weights of layers on the matrix units
};

constexpr long larger(long a, long b) { return a < b ? b : a; }
constexpr long least(long a, long b) { return a < b ? a : b; }

template <class K, int L>
KORCH_INLINE long first_channel(const Task& t) {
  return Layer<K, L>::SPLIT ? t.first : 0;
}

// What layer L reads: rows of the ring before it, or of the image.
template <class K, int L>
struct Source {
  typedef Layer<K, L - 1> Ring;
  static constexpr long PIXEL = Ring::PIXEL;
  static constexpr long STEP = Ring::RING * Ring::LINE * PIXEL;  // between blocks of channels
  static constexpr long BEFORE = 0;  // columns before the row's first that a window may begin at
  static KORCH_INLINE const float* row(const Task& t, long y) {
    return t.work + Ring::AT + y % Ring::RING * (Ring::LINE * PIXEL);
  }
};
template <class K>
struct Source<K, 0> {
  static constexpr long PIXEL = K::FORM == LAST ? K::C : K::W;
  static constexpr long STEP = K::H * K::WIDTH * PIXEL;
  static constexpr long BEFORE = Layer<K, 0>::LEFT;
  static KORCH_INLINE const float* row(const Task& t, long y) {
    return static_cast<const float*>(t.x) + y * K::WIDTH * PIXEL;
  }
};

template <class K, int L>
KORCH_INLINE float* ring(const Task& t, long y, long channel) {
  typedef Layer<K, L> A;
  const long block = (channel - first_channel<K, L>(t)) / A::PIXEL;
  return t.work + A::AT + ((block * A::RING + y % A::RING) * A::LINE + A::MARGIN) * A::PIXEL;
}

// Where results of the last layer lie.
template <class K>
KORCH_INLINE long place(const Task& t, long y, long x, long channel) {
  typedef Layer<K, LAST_LAYER<K>> A;
  if constexpr (K::OUT_LAST) return ((t.image * A::OUT_H + y) * A::OUT_WIDTH + x) * A::N + channel;
  const long block = t.image * (A::N / K::W) + channel / K::W;
  return ((block * A::OUT_H + y) * A::OUT_WIDTH + x) * K::W;
}

template <class K>
KORCH_INLINE const typename K::Result* results(const Task& t) {
  return static_cast<const typename K::Result*>(t.buffers[K::OUTPUT]);
}

// Where results of neighbours in a row go: into the ring, or to an offset of the result.
struct Target {
  float* ring;
  long at;
};
template <class K, int L>
KORCH_INLINE Target target(const Task& t, long y, long x, long channel) {
  if constexpr (L < LAST_LAYER<K>) return {ring<K, L>(t, y, channel) + x * K::W, 0};
  else return {nullptr, place<K>(t, y, x, channel)};
}

// Finish a vector of results, and put it where the neighbour goes that is `i` pixels further on.
template <class K, int L>
KORCH_INLINE void put(const Task& t, V<K> value, Target to, long i, long channel) {
  typedef Layer<K, L> A;
  if constexpr (L < LAST_LAYER<K>) {
    store<float, K::W>(to.ring + i * K::W, A::template finish<K::W>(t.buffers, value, 0, channel));
  } else {
    const long at = to.at + i * (K::OUT_LAST ? A::N : K::W);
    if (!K::OUT_LAST || A::N % K::W == 0 || channel + K::W <= A::N) {
      A::template finish<K::W>(t.buffers, value, at, channel);
    } else {
      for (long c = 0; channel + c < A::N; ++c)
        A::template finish<1>(t.buffers, value[c], at + c, channel + c);
    }
  }
}
template <class K, int L>
KORCH_INLINE void put(const Task& t, V<K> value, long y, long x, long channel) {
  put<K, L>(t, value, target<K, L>(t, y, x, channel), 0, channel);
}

// The rows of a window that are inside of what a layer reads.
struct Span {
  long first, last;
};
template <class A>
KORCH_INLINE Span taps(long y) {
  long first = 0, last = A::KH;
  while (first < last && y * A::SH - A::TOP + first * A::DH < 0) ++first;
  while (first < last && y * A::SH - A::TOP + (last - 1) * A::DH >= A::H) --last;
  return {first, last};
}

// Copy columns [from, to) of a row, each where `column` says.
template <class K, int PIXEL, class Column>
KORCH_INLINE void copy_pixels(const typename K::Element* row, float* line, long from, long to, Column column) {
  for (long x = from; x < to; ++x) {
    const long source = column(x);
    const float value = source < -1 ? 0.0f : K::FILL;
    if (source < 0) {
      for (long c = 0; c < PIXEL; ++c) line[x * PIXEL + c] = value;
    } else {
      for (long c = 0; c < PIXEL; ++c) line[x * PIXEL + c] = row[source * PIXEL + c];
    }
  }
}

// The ring has channels beside each other as the image has them.
template <class K, int L>
KORCH_INLINE void copy(const Task& t, long from, long to) {
  typedef Layer<K, L> A;
  typedef typename K::Element E;
  const long end = A::SPLIT ? t.last : A::C;
  for (long y = from; y < to; ++y) {
    const long row = K::row(y);
    for (long channel = first_channel<K, L>(t); channel < end; channel += A::PIXEL) {
      float* const line = ring<K, L>(t, y, channel);
      const E* const source = static_cast<const E*>(t.x) + (channel / A::PIXEL * K::H + row) * (K::WIDTH * A::PIXEL);
      if (row < 0) {
        const float value = row < -1 ? 0.0f : K::FILL;
        for (long i = 0; i < A::OUT_WIDTH * A::PIXEL; ++i) line[i] = value;
        continue;
      }
      copy_pixels<K, A::PIXEL>(source, line, 0, K::RUN, K::column);
      const E* const run = source + (K::RUN + K::SHIFT) * A::PIXEL;
      korch::widen(run, line + K::RUN * A::PIXEL, (K::RUN_END - K::RUN) * A::PIXEL);
      copy_pixels<K, A::PIXEL>(source, line, K::RUN_END, A::OUT_WIDTH, K::column);
    }
  }
}

}  // namespace korch_conv
