// A block of a product of bytes, signed or not, with sums of 32 bits that are exact: R rows times NV vectors of W
// columns in registers. The terms of a lie side by side; b comes in strips of NV * W columns, in which each column
// has four terms side by side, and terms beyond the last are 0.
#pragma once

#include "korch_contract.h"

namespace korch {

// Sums that a tile holds afterwards; rows are ROW elements apart.
template <long ROW>
struct StoredInts {
  int32_t* tile;
  template <int V>
  KORCH_INLINE void end(long r, long n, Vec<int32_t, V> sum) const { store<int32_t, V>(tile + r * ROW + n, sum); }
};

// What multiplies four terms of each lane at once.
enum class Dot {
  NONE,
  SATURATING,  // of an unsigned and a signed byte, but sums of two products saturate at 16 bits
  EXACT,       // of an unsigned and a signed byte
};

template <int W>
inline constexpr Dot DOT = Dot::NONE;
template <int W>
inline constexpr bool HAS_PAIRS = false;  // whether products of 16 bits are added in pairs
#if defined(__AVX2__)
template <>
inline constexpr bool HAS_PAIRS<8> = true;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && !defined(__clang__)
template <>
inline constexpr Dot DOT<8> = Dot::EXACT;
#else
template <>
inline constexpr Dot DOT<8> = Dot::SATURATING;
#endif
#endif
#if defined(__AVX512BW__) && !defined(__clang__)
template <>
inline constexpr bool HAS_PAIRS<16> = true;
#if defined(__AVX512VNNI__)
template <>
inline constexpr Dot DOT<16> = Dot::EXACT;
#endif
#endif

// The vectors of numbers of 16 or 32 bits that the four terms of each lane are widened to.
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

// sum + the products of the four unsigned bytes of a and the signed ones of b in each lane.
template <int W>
KORCH_INLINE Vec<int32_t, W> dot(Vec<int32_t, W> sum, Vec<int32_t, W> a, Vec<int32_t, W> b) {
#if defined(__AVX512VNNI__) && !defined(__clang__)
  typedef int32_t V16 __attribute__((vector_size(64)));
  if constexpr (W == 16) return Vec<int32_t, W>(__builtin_ia32_vpdpbusd_v16si(V16(sum), V16(a), V16(b)));
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && !defined(__clang__)
  typedef int32_t V8 __attribute__((vector_size(32)));
  if constexpr (W == 8) return Vec<int32_t, W>(__builtin_ia32_vpdpbusd_v8si(V8(sum), V8(a), V8(b)));
#elif defined(__AVX2__)
  typedef char Bytes __attribute__((vector_size(32)));
  typedef int16_t Words16 __attribute__((vector_size(32)));
  if constexpr (W == 8) {
    const Words16 ones = Words16{} + 1;
    const Words16 pairs = Words16(__builtin_ia32_pmaddubsw256(Bytes(a), Bytes(b)));
    return sum + Vec<int32_t, W>(__builtin_ia32_pmaddwd256(pairs, ones));
  }
#endif
  return sum;
}

// The sum of two weights of one sign, neighbouring terms of a column, whose products with unsigned bytes do not
// saturate. Where it would exceed this, the first weight is reduced, and what is left of it is multiplied exactly.
inline constexpr int16_t MOST_WEIGHTS = 128;

// Rows from which on that pays.
inline constexpr long PREPARED_ROWS = 16;

inline constexpr long CHUNK = 256;  // quads of terms that are prepared together

template <int W, int R, int NV, long ROWS, long A_ROW, long STRIP, int... TAILS>
struct ByteContraction {
  typedef Vec<int32_t, W> V;
  static constexpr long COLUMNS = NV * W, QUAD = 4 * COLUMNS;  // bytes of four terms of a strip

  // Some terms of a strip: where the weights are, what must be added to the sums of each column, and quads of
  // terms of whose first and third weights a rest of 16 bits is multiplied, too.
  struct Strip {
    const char* weights;
    V shift[NV];
    const char* rests;
    const int32_t* quads;
    long count;
  };

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

  // N rows. Sums begin with what `partial` has, unless the terms are the first, and are put there again unless these
  // are the last; of the columns only the first `count` exist.
  template <int N, bool IS_DOT, bool A_SIGNED, bool B_SIGNED, class Sums>
  static __attribute__((noinline)) void tile(const Sums& given, const char* a, const Strip& strip, int32_t* partial, bool is_first,
                                             bool is_last, long r0, long n0, long quads, long count) {
    const Sums sums = given;  // what is stored can't change it
    V sum[N][NV];
#pragma GCC unroll 32
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        sum[r][v] = is_first ? V{} : load<int32_t, W>(partial + (r0 + r) * COLUMNS + v * W);
        if constexpr (IS_DOT) sum[r][v] += strip.shift[v];
      }
    const char* const weights = strip.weights;
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
    if constexpr (IS_DOT && DOT<W> == Dot::SATURATING)
      for (long e = 0; e < strip.count; ++e) {
        V w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) w[v] = at(strip.rests + e * QUAD + 4 * W * v);
#pragma GCC unroll 32
        for (int r = 0; r < N; ++r) {
          V x = four(a + r * A_ROW + 4L * strip.quads[e]);
          if constexpr (A_SIGNED) x ^= splat<int32_t, W>(static_cast<int32_t>(0x80808080));
#if defined(__AVX2__)
          asm("" : "+x"(x));  // or else four bytes are changed in another register, from which two instructions copy them
#endif
          x &= splat<int32_t, W>(0x00ff00ff);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) sum[r][v] += multiply<W>(x, w[v]);
        }
      }
    if (!is_last) {
#pragma GCC unroll 32
      for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store<int32_t, W>(partial + (r0 + r) * COLUMNS + v * W, sum[r][v]);
    } else if (count >= COLUMNS) {
#pragma GCC unroll 32
      for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sums.template end<W>(r0 + r, n0 + v * W, sum[r][v]);
    } else {
      alignas(64) int32_t x[N * COLUMNS];  // from memory, so that what is done with each is compiled once
#pragma GCC unroll 32
      for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store<int32_t, W>(x + r * COLUMNS + v * W, sum[r][v]);
      for (long r = 0; r < N; ++r)
        for (long j = 0; j < count; ++j) sums.template end<1>(r0 + r, n0 + j, x[r * COLUMNS + j]);
    }
  }

  // Copy weights, reduced where sums of two products could saturate; return of how many quads a rest is left.
  static long prepare(const char* from, long quads, char* to, char* rests, int32_t* which) {
    typedef Vec<int16_t, 2 * W> Words;
    long count = 0;
    for (long q = 0; q < quads; ++q) {
      Vec<int64_t, W / 2> any = {};
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const Words both = __builtin_bit_cast(Words, at(from + q * QUAD + 4 * W * v)), zero = {};
        const Words first = (both << 8) >> 8, second = both >> 8;
        const Words most = (first > 0 ? first : zero) + (second > 0 ? second : zero) - MOST_WEIGHTS;
        const Words least = (first < 0 ? first : zero) + (second < 0 ? second : zero) + MOST_WEIGHTS;
        const Words rest = (most > 0 ? most : zero) + (least < 0 ? least : zero);
        any |= __builtin_bit_cast(Vec<int64_t, W / 2>, rest);
        store<int16_t, 2 * W>(reinterpret_cast<int16_t*>(to + q * QUAD + 4 * W * v), ((first - rest) & 0xff) | (second << 8));
        store<int16_t, 2 * W>(reinterpret_cast<int16_t*>(rests + count * QUAD + 4 * W * v), rest);
      }
      int64_t all = 0;
#pragma GCC unroll 8
      for (int i = 0; i < W / 2; ++i) all |= any[i];
      which[count] = static_cast<int32_t>(q);
      count += all != 0;
    }
    return count;
  }

  // What signed bytes of a, to which 128 has been added, give too much with some weights.
  static void set_shift(Strip& strip, const char* weights, long quads) {
    V total[NV] = {};
    for (long q = 0; q < quads; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) total[v] = dot<W>(total[v], splat<int32_t, W>(0x01010101), at(weights + q * QUAD + 4 * W * v));
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) strip.shift[v] = total[v] * -128;
  }

  template <bool IS_DOT, bool A_SIGNED, bool B_SIGNED, class Sums>
  static KORCH_INLINE void rows(const Sums& sums, const char* a, const Strip& strip, int32_t* partial, bool is_first, bool is_last,
                                long n, long rows, long quads, long count) {
    long r = 0;
    for (; r + R <= rows; r += R)
      tile<R, IS_DOT, A_SIGNED, B_SIGNED>(sums, a + r * A_ROW, strip, partial, is_first, is_last, r, n, quads, count);
    (void)((r + TAILS == rows &&
            (tile<TAILS, IS_DOT, A_SIGNED, B_SIGNED>(sums, a + r * A_ROW, strip, partial, is_first, is_last, r, n, quads, count), true)) || ...);
  }

  template <class Sums, typename A, typename B>
  static KORCH_INLINE void run(const Sums& sums, const A* a, const B* b, long count, long columns, long terms) {
    constexpr bool A_SIGNED = static_cast<A>(-1) < 0, B_SIGNED = static_cast<B>(-1) < 0;
    constexpr bool IS_PREPARED = B_SIGNED && DOT<W> == Dot::SATURATING && ROWS >= PREPARED_ROWS;
    constexpr bool IS_DOT = IS_PREPARED || (B_SIGNED && DOT<W> == Dot::EXACT);
    const long all = blocks(terms, 4), step = IS_PREPARED ? CHUNK : all;
    [[maybe_unused]] alignas(64) char room[IS_PREPARED ? 2 * CHUNK * QUAD : 1];
    alignas(64) int32_t partial[IS_PREPARED ? ROWS * COLUMNS : 1];
    [[maybe_unused]] int32_t which[CHUNK];
    for (long n = 0; n < columns; n += COLUMNS) {
      const char* const from = reinterpret_cast<const char*>(b) + n / COLUMNS * STRIP;
      long q = 0;
      do {  // once without terms: sums are 0
        const long quads = smaller(step, all - q);
        const bool is_first = q == 0, is_last = q + quads >= all;
        Strip strip{from + q * QUAD, {}, nullptr, nullptr, 0};
        const char* const start = reinterpret_cast<const char*>(a) + 4 * q;
        if constexpr (IS_DOT && A_SIGNED) set_shift(strip, strip.weights, quads);
        if constexpr (IS_PREPARED) {
          strip.count = prepare(strip.weights, quads, room, room + CHUNK * QUAD, which);
          strip.weights = room, strip.rests = room + CHUNK * QUAD, strip.quads = which;
        }
        rows<IS_DOT, A_SIGNED, B_SIGNED>(sums, start, strip, partial, is_first, is_last, n, count, quads, columns - n);
        q += quads;
      } while (q < all);
    }
  }
};

}  // namespace korch
