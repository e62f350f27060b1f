// A depthwise convolution of signed or unsigned bytes, with exact 32-bit sums: each vector lane is a channel.
#pragma once

#include "korch_contract_int.h"

namespace korch {

// A number known at compile time; `for_each` calls f with each number of a list.
template <int I>
struct Number {
  static constexpr int value = I;
};
template <int... I, class F>
KORCH_INLINE void for_each(Lanes<I...>, F f) {
  (f(Number<I>()), ...);
}

// W adjacent bytes, widened to numbers of 32 bits.
template <int W, typename T>
KORCH_INLINE Vec<int32_t, W> single_rows(const T* x) {
  return extended<int32_t, T, W>(load<T, W>(x));
}

template <int W, typename T, int... I>
KORCH_INLINE Vec<T, 2 * W> interleaved(Vec<T, W> x, Vec<T, W> y, Lanes<I...>) {
  return __builtin_shufflevector(x, y, (I / 2 + I % 2 * W)...);
}

// A window of KH x KW elements. Element (row, ky, kx, channel) of a is at a[row * A_ROW + ky * A_KY + kx * A_KX + channel],
// with A_ROW = S * UNIT and A_KX = D * UNIT. Weights come in panels of W channels: a channel's weights for ky = 2 q and
// 2 q + 1 are adjacent; the second is 0 beyond the window. R rows are computed at a time; TAILS lists the numbers of rows
// below R that may remain. Whole vectors of channels are read of a, even beyond the last channel.
template <int W, int R, int KH, int KW, int S, int D, long UNIT, long A_KY, int... TAILS>
struct LaneContraction {
  typedef Vec<int32_t, W> V;
  static constexpr int PAIRS = (KH + 1) / 2;
  static constexpr long PANEL = 2L * PAIRS * KW * W;

  // The column kx of row r's window that is at position c, counted in units; -1 if there is none.
  static constexpr int column(int c, int r) {
    const int from = c - r * S;
    return from >= 0 && from % D == 0 && from / D < KW ? from / D : -1;
  }
  template <int N>
  static constexpr bool is_read(int c) {
    for (int r = 0; r < N; ++r)
      if (column(c, r) >= 0) return true;
    return false;
  }

  template <int N, typename A, typename B>
  static KORCH_INLINE void sum_up(V (&sum)[N], const A* a, const B* b) {
    constexpr int REACH = (N - 1) * S + (KW - 1) * D + 1;
    V w[KW][PAIRS];
    for_each(typename LanesTo<KW * PAIRS>::type(), [&](auto i) __attribute__((always_inline)) {
      constexpr int I = decltype(i)::value;
      w[I / PAIRS][I % PAIRS] = pairs<W, B>(load<B, 2 * W>(b + 2 * W * I));
    });
    for_each(typename LanesTo<N>::type(), [&](auto r) __attribute__((always_inline)) { sum[decltype(r)::value] = V{}; });
    for_each(typename LanesTo<REACH>::type(), [&](auto c) __attribute__((always_inline)) {
      constexpr int C = decltype(c)::value;
      if constexpr (is_read<N>(C)) {
        for_each(typename LanesTo<PAIRS>::type(), [&](auto q) __attribute__((always_inline)) {
          constexpr int Q = decltype(q)::value;
          const A* const at = a + C * UNIT + 2 * Q * A_KY;
          V x;
          if constexpr (2 * Q + 1 == KH) x = single_rows<W, A>(at);  // the second weight is 0
          else x = pairs<W, A>(interleaved<W, A>(load<A, W>(at), load<A, W>(at + A_KY), typename LanesTo<2 * W>::type()));
          for_each(typename LanesTo<N>::type(), [&](auto r) __attribute__((always_inline)) {
            constexpr int ROW = decltype(r)::value, KX = column(C, ROW);
            if constexpr (KX >= 0) sum[ROW] += multiply_pairs<W>(x, w[KX][Q]);
          });
        });
      }
    });
  }

  template <int N, class Sums, typename A, typename B>
  static __attribute__((noinline)) void tile(const Sums& given, const A* a, const B* b, long r0, long columns) {
    const Sums sums = given;  // a local copy, which stores can't alias
    long n = 0;
    for (; n + W <= columns; n += W, b += PANEL) {
      V sum[N];
      sum_up<N>(sum, a + n, b);
#pragma GCC unroll 32
      for (int r = 0; r < N; ++r) sums.template end<W>(r0 + r, n, sum[r]);
    }
    if (n >= columns) return;
    V sum[N];
    sum_up<N>(sum, a + n, b);
    alignas(64) int32_t x[N * W];  // through memory, so that the code for one element is compiled only once
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r) store<int32_t, W>(x + r * W, sum[r]);
    for (long r = 0; r < N; ++r)
      for (long j = 0; j < columns - n; ++j) sums.template end<1>(r0 + r, n + j, x[r * W + j]);
  }

  template <class Sums, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const A* a, const B* b, long count, long columns) {
    long r = 0;
    for (; r + R <= count; r += R) tile<R>(sums, a + r * S * UNIT, b, r, columns);
    (void)((r + TAILS == count && (tile<TAILS>(sums, a + r * S * UNIT, b, r, columns), true)) || ...);
  }
};

}  // namespace korch
