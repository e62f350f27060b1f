// A block of a matrix product of signed or unsigned bytes, with exact 32-bit sums and register blocking: R rows times NV
// vectors of W columns. The terms of a are contiguous. b comes in strips of NV * W columns, in which four terms of a column
// are adjacent, and terms beyond the last are 0.
#pragma once

#include "korch_contract.h"

namespace korch {

// Sums that are stored to a tile; rows are ROW elements apart.
template <long ROW>
struct StoredInts {
  int32_t* tile;
  template <int V>
  KORCH_INLINE void end(long r, long n, Vec<int32_t, V> sum) const { store<int32_t, V>(tile + r * ROW + n, sum); }
};

template <int W>
inline constexpr bool HAS_DOT = false;  // whether one instruction multiplies and adds four bytes of each lane
template <int W>
inline constexpr bool HAS_PAIRS = false;  // whether products of 16 bits are added in pairs
#if defined(__AVX2__)
template <>
inline constexpr bool HAS_PAIRS<8> = true;
#endif
#if defined(__AVX512BW__) && !defined(__clang__)
template <>
inline constexpr bool HAS_PAIRS<16> = true;
#if defined(__AVX512VNNI__)
template <>
inline constexpr bool HAS_DOT<16> = true;
#endif
#endif

// The number of vectors, of 16-bit or 32-bit numbers, to which the four terms of each lane are widened.
template <int W>
inline constexpr int PARTS = HAS_PAIRS<W> ? 2 : 4;

template <int W, bool IS_SIGNED>
KORCH_INLINE void widen(Vec<int32_t, W> x, Vec<int32_t, W> (&to)[PARTS<W>]) {
  if constexpr (HAS_PAIRS<W>) {
    if constexpr (IS_SIGNED) {
      const auto words = __builtin_bit_cast(Vec<int16_t, 2 * W>, x);
      to[0] = __builtin_bit_cast(Vec<int32_t, W>, (words << 8) >> 8);
      to[1] = __builtin_bit_cast(Vec<int32_t, W>, words >> 8);
    } else {
      const auto words = __builtin_bit_cast(Vec<uint16_t, 2 * W>, x);
      to[0] = x & splat<int32_t, W>(0x00ff00ff);
      to[1] = __builtin_bit_cast(Vec<int32_t, W>, words >> 8);
    }
  } else {
    const auto bits = __builtin_bit_cast(Vec<uint32_t, W>, x);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const Vec<uint32_t, W> top = bits << (24 - 8 * t);
      if constexpr (IS_SIGNED) to[t] = __builtin_bit_cast(Vec<int32_t, W>, top) >> 24;
      else to[t] = __builtin_bit_cast(Vec<int32_t, W>, top >> 24);
    }
  }
}

template <int W>
KORCH_INLINE Vec<int32_t, W> multiply(Vec<int32_t, W> a, Vec<int32_t, W> b) {
#if defined(__AVX512BW__) && !defined(__clang__)
  typedef int16_t Words32 __attribute__((vector_size(64)));
  typedef int32_t V16 __attribute__((vector_size(64)));
  if constexpr (W == 16) return Vec<int32_t, W>(__builtin_ia32_pmaddwd512_mask(Words32(a), Words32(b), V16{}, 0xffff));
#endif
#if defined(__AVX2__)
  typedef int16_t Words16 __attribute__((vector_size(32)));
  if constexpr (W == 8) return Vec<int32_t, W>(__builtin_ia32_pmaddwd256(Words16(a), Words16(b)));
#endif
  return a * b;
}

// The sum of the two products of numbers of 16 bits in each lane.
template <int W>
KORCH_INLINE Vec<int32_t, W> multiply_pairs(Vec<int32_t, W> a, Vec<int32_t, W> b) {
  if constexpr (HAS_PAIRS<W>) return multiply<W>(a, b);
  else return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}

// Pairs of adjacent numbers, as a pair of 16-bit numbers in each of W lanes.
template <int W, typename T>
KORCH_INLINE Vec<int32_t, W> pairs(Vec<T, 2 * W> x) {
  if constexpr (sizeof(T) == 2) return __builtin_bit_cast(Vec<int32_t, W>, x);
  else return __builtin_bit_cast(Vec<int32_t, W>, extended<int16_t, T, 2 * W>(x));
}

// sum + the products of the four unsigned bytes of a and the signed ones of b in each lane.
template <int W>
KORCH_INLINE Vec<int32_t, W> dot(Vec<int32_t, W> sum, Vec<int32_t, W> a, Vec<int32_t, W> b) {
#if defined(__AVX512VNNI__) && !defined(__clang__)
  typedef int32_t V16 __attribute__((vector_size(64)));
  if constexpr (W == 16) return Vec<int32_t, W>(__builtin_ia32_vpdpbusd_v16si(V16(sum), V16(a), V16(b)));
#endif
  return sum;
}

// Pass the sums of N rows and NV vectors of columns to `sums`; only the first `count` columns exist.
template <int W, int N, int NV, class Sums>
KORCH_INLINE void end_block(const Sums& sums, const Vec<int32_t, W> (&sum)[N][NV], long r0, long n0, long count) {
  constexpr long COLUMNS = NV * W;
  if (count >= COLUMNS) {
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums.template end<W>(r0 + r, n0 + v * W, sum[r][v]);
  } else {
    alignas(64) int32_t x[N * COLUMNS];  // through memory, so that the code for one element is compiled only once
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store<int32_t, W>(x + r * COLUMNS + v * W, sum[r][v]);
    for (long r = 0; r < N; ++r) {
      const int32_t* const row = x + r * COLUMNS;
      long j = 0;
      for (; j + W <= count; j += W) sums.template end<W>(r0 + r, n0 + j, load<int32_t, W>(row + j));
      if constexpr (W >= 8)
        if (j + W / 2 <= count) sums.template end<W / 2>(r0 + r, n0 + j, load<int32_t, W / 2>(row + j)), j += W / 2;
      for (; j < count; ++j) sums.template end<1>(r0 + r, n0 + j, row[j]);
    }
  }
}

template <int W, int R, int NV, long A_ROW, long STRIP, int... TAILS>
struct ByteContraction {
  typedef Vec<int32_t, W> V;
  static constexpr long COLUMNS = NV * W, QUAD = 4 * COLUMNS;  // bytes of four terms of a strip

  static KORCH_INLINE V at(const char* x) { return load<int32_t, W>(reinterpret_cast<const int32_t*>(x)); }
  static KORCH_INLINE V four(const char* a) {
    int32_t x;
    __builtin_memcpy(&x, a, 4);
    return splat<int32_t, W>(x);
  }

  // Add the products of four terms, exactly.
  template <int N, bool A_SIGNED, bool B_SIGNED>
  static KORCH_INLINE void add(V (&sum)[N][NV], const char* a, const char* weights) {
    V w[NV][PARTS<W>];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) widen<W, B_SIGNED>(at(weights + 4 * W * v), w[v]);
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r) {
      V x[PARTS<W>];
      widen<W, A_SIGNED>(four(a + r * A_ROW), x);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
#pragma GCC unroll 4
        for (int t = 0; t < PARTS<W>; ++t) sum[r][v] += multiply<W>(x[t], w[v][t]);
    }
  }

  // Compute N rows; `shift` is added to the sums of each column.
  template <int N, bool IS_DOT, bool A_SIGNED, bool B_SIGNED, class Sums>
  static __attribute__((noinline)) void tile(const Sums& given, const char* a, const char* weights, const V (&shift)[NV],
                                             long r0, long n0, long quads, long count) {
    const Sums sums = given;  // a local copy, which stores can't alias
    V sum[N][NV];
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = shift[v];
    for (long q = 0; q < quads; ++q) {
      if constexpr (IS_DOT) {
        V w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) w[v] = at(weights + q * QUAD + 4 * W * v);
#pragma GCC unroll 32
        for (int r = 0; r < N; ++r) {
          V x = four(a + r * A_ROW + 4 * q);
          if constexpr (A_SIGNED) x ^= splat<int32_t, W>(static_cast<int32_t>(0x80808080));
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) sum[r][v] = dot<W>(sum[r][v], x, w[v]);
        }
      } else {
        add<N, A_SIGNED, B_SIGNED>(sum, a + 4 * q, weights + q * QUAD);
      }
    }
    end_block<W, N, NV>(sums, sum, r0, n0, count);
  }

  // Set the correction of each column's sum for signed bytes of a, which are multiplied with 128 added to them.
  static void set_shift(V (&shift)[NV], const char* weights, long quads) {
    for (long q = 0; q < quads; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) shift[v] = dot<W>(shift[v], splat<int32_t, W>(0x01010101), at(weights + q * QUAD + 4 * W * v));
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) shift[v] *= -128;
  }

  template <class Sums, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const A* a, const B* b, long rows, long columns, long terms) {
    constexpr bool A_SIGNED = static_cast<A>(-1) < 0, B_SIGNED = static_cast<B>(-1) < 0, IS_DOT = B_SIGNED && HAS_DOT<W>;
    const long quads = blocks(terms, 4);
    const char* const first = reinterpret_cast<const char*>(a);
    for (long n = 0; n < columns; n += COLUMNS) {
      const char* const weights = reinterpret_cast<const char*>(b) + n / COLUMNS * STRIP;
      V shift[NV] = {};
      if constexpr (IS_DOT && A_SIGNED) set_shift(shift, weights, quads);
      long r = 0;
      for (; r + R <= rows; r += R)
        tile<R, IS_DOT, A_SIGNED, B_SIGNED>(sums, first + r * A_ROW, weights, shift, r, n, quads, columns - n);
      (void)((r + TAILS == rows &&
              (tile<TAILS, IS_DOT, A_SIGNED, B_SIGNED>(sums, first + r * A_ROW, weights, shift, r, n, quads, columns - n), true)) || ...);
    }
  }
};

// The same product for a that has been widened to 16-bit numbers: in a strip of b, two terms of a column are adjacent, of
// 8 or 16 bits. Products of 16-bit numbers are added in pairs without overflow, so weights may have any value. Terms come
// in TURNS runs, which begin A_TURN and B_TURN elements apart.
template <int W, int R, int NV, long A_ROW, long STRIP, int TURNS, long A_TURN, long B_TURN, int... TAILS>
struct PairContraction {
  typedef Vec<int32_t, W> V;
  static constexpr long COLUMNS = NV * W;

  static KORCH_INLINE V two(const int16_t* a) {
    int32_t x;
    __builtin_memcpy(&x, a, 4);
    return splat<int32_t, W>(x);
  }

  template <int N, class Sums, typename B>
  static __attribute__((noinline)) void tile(const Sums& given, const int16_t* a, const B* b, long r0, long n0, long terms, long count) {
    const Sums sums = given;  // a local copy, which stores can't alias
    V sum[N][NV] = {};
    for (int turn = 0; turn < TURNS; ++turn, a += A_TURN, b += B_TURN)
#pragma GCC unroll 2
      for (long t = 0; t < terms; t += 2) {
        V w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) w[v] = pairs<W, B>(load<B, 2 * W>(b + t * COLUMNS + 2 * W * v));
#pragma GCC unroll 32
        for (int r = 0; r < N; ++r) {
          const V x = two(a + r * A_ROW + t);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) sum[r][v] += multiply_pairs<W>(x, w[v]);
        }
      }
    end_block<W, N, NV>(sums, sum, r0, n0, count);
  }

  template <class Sums, typename B>
  static KORCH_INLINE void run(const Sums& sums, const int16_t* a, const B* b, long rows, long columns, long terms) {
    for (long n = 0; n < columns; n += COLUMNS, b += STRIP) {
      long r = 0;
      for (; r + R <= rows; r += R) tile<R>(sums, a + r * A_ROW, b, r, n, terms, columns - n);
      (void)((r + TAILS == rows && (tile<TAILS>(sums, a + r * A_ROW, b, r, n, terms, columns - n), true)) || ...);
    }
  }
};

}  // namespace korch
