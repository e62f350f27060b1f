// Elements of 16 bits: stored as such, computed with in float32. A load widens, a store rounds once
// to nearest, ties to even; NaN, infinities and subnormals are kept.
#pragma once

#include <stdint.h>

#include "korch_tile.h"

namespace korch {

struct bfloat16 {
  uint16_t bits;
  static KORCH_INLINE float widen(uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
  static KORCH_INLINE uint16_t narrow(float x) {
    const uint32_t b = __builtin_bit_cast(uint32_t, x);
    const uint32_t quiet = (b >> 16) | 0x40u;
    const uint32_t near = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? quiet : near);
  }
  KORCH_INLINE operator float() const { return widen(bits); }
  KORCH_INLINE bfloat16& operator=(float x) { bits = narrow(x); return *this; }
};

struct half {
  uint16_t bits;
  // By bits, as any compiler can: the exponent is moved by a multiplication that is exact.
  static KORCH_INLINE float widen(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const uint32_t moved = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, rest) * 0x1p112f);
    const uint32_t special = rest | 0x7f800000u;
    return __builtin_bit_cast(float, sign | ((h & 0x7c00u) == 0x7c00u ? special : moved));
  }
  static KORCH_INLINE uint16_t narrow(float x) {
    const uint32_t b = __builtin_bit_cast(uint32_t, x);
    const uint32_t sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    // Below 2^-14 adding 1/2 leaves the subnormal's bits at the end of the sum, rounded to even.
    const float tiny = __builtin_bit_cast(float, a) + 0.5f;
    const uint32_t small = __builtin_bit_cast(uint32_t, tiny) - 0x3f000000u;
    const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    uint32_t y = a < 0x38800000u ? small : normal;
    y = a >= 0x477ff000u ? 0x7c00u : y;
    y = a > 0x7f800000u ? 0x7e00u : y;
    return static_cast<uint16_t>(sign | y);
  }
  KORCH_INLINE operator float() const { return widen(bits); }
  KORCH_INLINE half& operator=(float x) { bits = narrow(x); return *this; }
};

// A value rounded to what S can hold.
template <typename S, int W>
KORCH_INLINE Vec<float, W> rounded(Vec<float, W> x) {
  if constexpr (W == 1) {
    return S::widen(S::narrow(x));
  } else {
    for (int i = 0; i < W; ++i) x[i] = S::widen(S::narrow(x[i]));
    return x;
  }
}

#define KORCH_STORAGE(S)                                                             \
  template <typename T, int W>                                                      \
  KORCH_INLINE Vec<T, W> load(const S* at) {                                        \
    if constexpr (W == 1) {                                                         \
      return S::widen(at->bits);                                                    \
    } else {                                                                        \
      alignas(64) float x[W];                                                       \
      for (int i = 0; i < W; ++i) x[i] = S::widen(at[i].bits);                      \
      return load<float, W>(x);                                                     \
    }                                                                               \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE void scatter(S* at, long step, Vec<T, W> x) {                        \
    for (int i = 0; i < W; ++i) at[i * step].bits = S::narrow(lane<float, W>(x, i)); \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE void store(S* at, Vec<T, W> x) {                                     \
    scatter<T, W>(at, 1, x);                                                        \
  }                                                                                 \
  template <typename T, int W>                                                      \
  KORCH_INLINE Vec<T, W> strided(const S* at, long step) {                          \
    Vec<T, W> x;                                                                    \
    if constexpr (W == 1) x = S::widen(at->bits);                                   \
    else for (int i = 0; i < W; ++i) x[i] = S::widen(at[i * step].bits);            \
    return x;                                                                       \
  }                                                                                 \
  template <typename T, int W, typename Index>                                      \
  KORCH_INLINE Vec<T, W> gather(const S* from, Index index, long i) {               \
    Vec<T, W> x;                                                                    \
    if constexpr (W == 1) x = S::widen(from[index(i)].bits);                        \
    else for (int k = 0; k < W; ++k) x[k] = S::widen(from[index(i + k)].bits);      \
    return x;                                                                       \
  }
KORCH_STORAGE(half)
KORCH_STORAGE(bfloat16)

}  // namespace korch
