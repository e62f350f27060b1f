// 16-bit float elements, which are stored in 16 bits and computed in float32. A load widens, a store rounds
// once to nearest, ties to even; NaN, infinities and subnormals are preserved.
#pragma once

#include <stdint.h>

#include "korch_tile.h"

namespace korch {

template <int W>
using Bits16 = Vec<uint16_t, W>;
template <int W>
using Bits32 = Vec<uint32_t, W>;

// Unsigned integers converted to another width. GCC 12 would widen a vector of 16-bit numbers in two halves.
template <typename To, int W, typename From>
KORCH_INLINE Vec<To, W> resized(From x) {
#if defined(__AVX2__) && !defined(__clang__)
  typedef int16_t V8 __attribute__((vector_size(16)));
  if constexpr (W == 8 && sizeof(To) == 4 && sizeof(From) == 16) return Vec<To, W>(__builtin_ia32_pmovzxwd256(V8(x)));
#endif
#if defined(__AVX512F__) && !defined(__clang__)
  typedef int16_t V16 __attribute__((vector_size(32)));
  typedef int32_t V16Wide __attribute__((vector_size(64)));
  if constexpr (W == 16 && sizeof(To) == 4 && sizeof(From) == 32)
    return Vec<To, W>(__builtin_ia32_pmovzxwd512_mask(V16(x), V16Wide{}, -1));
#endif
  if constexpr (W == 1) return static_cast<To>(x);
  else return __builtin_convertvector(x, Vec<To, W>);
}

struct bfloat16 {
  uint16_t bits;
  template <int W>
  static KORCH_INLINE Vec<float, W> widen(Bits16<W> x) {
    return __builtin_bit_cast(Vec<float, W>, resized<uint32_t, W>(x) << 16);
  }
  template <int W>
  static KORCH_INLINE Bits16<W> narrow(Vec<float, W> x) {
    return resized<uint16_t, W>(__builtin_bit_cast(Bits32<W>, rounded<W>(x)) >> 16);
  }
  // Rounded, but kept in 32 bits, so that further computations need no unpacking.
  template <int W>
  static KORCH_INLINE Vec<float, W> rounded(Vec<float, W> x) {
    const Bits32<W> b = __builtin_bit_cast(Bits32<W>, x);
    const Bits32<W> near = b + 0x7fffu + ((b >> 16) & 1u);
    return __builtin_bit_cast(Vec<float, W>, (x == x ? near : b | 0x400000u) & 0xffff0000u);
  }
  KORCH_INLINE operator float() const { return widen<1>(bits); }
  KORCH_INLINE bfloat16& operator=(float x) { bits = narrow<1>(x); return *this; }
};

struct half {
  uint16_t bits;
  // Without an instruction for it, by bit operations: an exact multiplication adjusts the exponent.
  template <int W>
  static KORCH_INLINE Vec<float, W> widen(Bits16<W> h) {
#if defined(__AVX512F__)
    typedef int16_t V16 __attribute__((vector_size(32)));
    typedef float F16 __attribute__((vector_size(64)));
    if constexpr (W == 16) return Vec<float, W>(__builtin_ia32_vcvtph2ps512_mask(V16(h), F16{}, 0xffff, 4));
#endif
#if defined(__F16C__)
    typedef int16_t V8 __attribute__((vector_size(16)));
    if constexpr (W == 8) return Vec<float, W>(__builtin_ia32_vcvtph2ps256(V8(h)));
#endif
    const Bits32<W> b = resized<uint32_t, W>(h);
    const Bits32<W> sign = (b & 0x8000u) << 16, rest = (b & 0x7fffu) << 13;
    const Bits32<W> moved = __builtin_bit_cast(Bits32<W>, __builtin_bit_cast(Vec<float, W>, rest) * 0x1p112f);
    return __builtin_bit_cast(Vec<float, W>, sign | ((b & 0x7c00u) == 0x7c00u ? rest | 0x7f800000u : moved));
  }
  template <int W>
  static KORCH_INLINE Bits16<W> narrow(Vec<float, W> x) {
#if defined(__AVX512F__)
    typedef int16_t V16 __attribute__((vector_size(32)));
    typedef float F16 __attribute__((vector_size(64)));
    if constexpr (W == 16) return Bits16<W>(__builtin_ia32_vcvtps2ph512_mask(F16(x), 0, V16{}, 0xffff));
#endif
#if defined(__F16C__)
    typedef float F8 __attribute__((vector_size(32)));
    if constexpr (W == 8) return Bits16<W>(__builtin_ia32_vcvtps2ph256(F8(x), 0));
#endif
    const Bits32<W> b = __builtin_bit_cast(Bits32<W>, x), a = b & 0x7fffffffu;
    // Below 2^-14, adding 1/2 leaves the subnormal's bits, rounded to even, in the sum's lowest bits.
    const Vec<float, W> tiny = __builtin_bit_cast(Vec<float, W>, a) + 0.5f;
    const Bits32<W> small = __builtin_bit_cast(Bits32<W>, tiny) - 0x3f000000u;
    const Bits32<W> normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const Bits32<W> infinity = a * 0u + 0x7c00u, nan = infinity + 0x200u;
    Bits32<W> y = a < 0x38800000u ? small : normal;
    y = a >= 0x477ff000u ? infinity : y;
    y = a > 0x7f800000u ? nan : y;
    return resized<uint16_t, W>(((b >> 16) & 0x8000u) | y);
  }
  template <int W>
  static KORCH_INLINE Vec<float, W> rounded(Vec<float, W> x) {
    return widen<W>(narrow<W>(x));
  }
  KORCH_INLINE operator float() const { return widen<1>(bits); }
  KORCH_INLINE half& operator=(float x) { bits = narrow<1>(x); return *this; }
};

// A value rounded to what S can hold.
template <typename S, int W>
KORCH_INLINE Vec<float, W> rounded(Vec<float, W> x) {
  return S::template rounded<W>(x);
}

#define KORCH_STORAGE(S)                                                             \
  template <typename T, int W>                                                      \
  KORCH_INLINE Vec<T, W> load(const S* at) {                                        \
    return S::template widen<W>(load<uint16_t, W>(&at->bits));                      \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE void store(S* at, Vec<T, W> x) {                                     \
    store<uint16_t, W>(&at->bits, S::template narrow<W>(x));                        \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE void scatter(S* at, long step, Vec<T, W> x) {                        \
    scatter<uint16_t, W>(&at->bits, step, S::template narrow<W>(x));                \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE Vec<T, W> strided(const S* at, long step) {                          \
    return S::template widen<W>(strided<uint16_t, W>(&at->bits, step));             \
  }                                                                                 \
  template <typename T, int W, typename Index>                                      \
  KORCH_INLINE Vec<T, W> gather(const S* from, Index index, long i) {               \
    Bits16<W> x;                                                                    \
    if constexpr (W == 1) x = from[index(i)].bits;                                  \
    else for (int k = 0; k < W; ++k) x[k] = from[index(i + k)].bits;                \
    return S::template widen<W>(x);                                                 \
  }
KORCH_STORAGE(half)
KORCH_STORAGE(bfloat16)

// Copy elements as float32.
template <typename S>
KORCH_INLINE void widen(const S* from, float* to, long count) {
  constexpr int W = sizeof(S) == 2 ? 8 : 1;
  long i = 0;
  for (; i + W <= count; i += W) store<float, W>(to + i, load<float, W>(from + i));
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

}  // namespace korch
