// Functions that printed tile programs call: the operations of the primitive table on vectors of any width
// (korch_vector.h), and reductions across lanes. Truth values are uint8_t.
#pragma once

#include "korch_math.h"

namespace korch {

// Elementwise operations, named as in the primitive table. Those of korch_math.h compute whole
// vectors; the others are computed lane by lane.
template <typename R, typename T, int W, typename F>
KORCH_INLINE Vec<R, W> lanewise(Vec<T, W> a, F f) {
  if constexpr (W == 1) {
    return static_cast<R>(f(a));
  } else {
    Vec<R, W> y;
    for (int i = 0; i < W; ++i) y[i] = static_cast<R>(f(static_cast<T>(a[i])));
    return y;
  }
}

template <typename R, typename T, int W, typename F>
KORCH_INLINE Vec<R, W> lanewise(Vec<T, W> a, Vec<T, W> b, F f) {
  if constexpr (W == 1) {
    return static_cast<R>(f(a, b));
  } else {
    Vec<R, W> y;
    for (int i = 0; i < W; ++i) y[i] = static_cast<R>(f(static_cast<T>(a[i]), static_cast<T>(b[i])));
    return y;
  }
}

#define KORCH_UNARY(NAME, R, EXPRESSION)                                      \
  template <typename T, int W>                                               \
  KORCH_INLINE Vec<R, W> op_##NAME(Vec<T, W> a) {                            \
    return lanewise<R, T, W>(a, [](T x) __attribute__((always_inline)) { return EXPRESSION; }); \
  }
#define KORCH_BINARY(NAME, R, EXPRESSION)                                     \
  template <typename T, int W>                                               \
  KORCH_INLINE Vec<R, W> op_##NAME(Vec<T, W> a, Vec<T, W> b) {               \
    return lanewise<R, T, W>(a, b, [](T x, T y) __attribute__((always_inline)) { return EXPRESSION; }); \
  }

// A table lookup by four bits of each byte, from bit SHIFT on. The table's 16 entries are given as bits of float32.
template <int W, int SHIFT, uint32_t... BITS>
KORCH_INLINE Vec<float, W> looked_up(Vec<uint8_t, W> bytes) {
  alignas(64) static constexpr uint32_t TABLE[16] = {BITS...};
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  if constexpr (W == 16)
    return avx512::entries((avx512::Floats)load<uint32_t, 16>(TABLE), cast<int32_t, uint8_t, 16>(bytes) >> SHIFT);
#endif
  return lanewise<float, uint8_t, W>(bytes, [](uint8_t x) __attribute__((always_inline)) {
    return __builtin_bit_cast(float, TABLE[(x >> SHIFT) & 15]);
  });
}

// With GCC's vector extensions, ?: selects lanes of vectors; the same expression also works for scalars.
template <typename T, int W>
KORCH_INLINE Vec<T, W> op_neg(Vec<T, W> a) {
  return -a;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_abs(Vec<T, W> a) {
  Vec<T, W> zero = splat<T, W>(0);
  return a > zero ? a : zero - a;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_sign(Vec<T, W> a) {
  Vec<T, W> zero = splat<T, W>(0), one = splat<T, W>(1);
  Vec<T, W> other = a < zero ? zero - one : a;  // a zero, or NaN
  return a > zero ? one : other;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_reciprocal(Vec<T, W> a) {
  return splat<T, W>(1) / a;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_max(Vec<T, W> a, Vec<T, W> b) {
  Vec<T, W> larger = greater_of<T, W>(b, a);  // a if either is NaN; the test below is a constant if b is a literal
  if constexpr (is_integer<T>) return larger;
  else return b != b ? b : larger;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_min(Vec<T, W> a, Vec<T, W> b) {
  Vec<T, W> smaller = less_of<T, W>(b, a);
  if constexpr (is_integer<T>) return smaller;
  else return b != b ? b : smaller;
}

// A comparison of vectors gives -1 in each lane where it holds; truth values are 1. In longer vectors, the
// lanes' width is halved or doubled step by step: if there is no instruction for a direct conversion, GCC
// 12 generates scalar code for each lane.
#if defined(__AVX512F__)
inline constexpr int NARROWED_AT_ONCE = 64;
#else
inline constexpr int NARROWED_AT_ONCE = 0;
#endif

template <int W, typename Mask>
KORCH_INLINE Vec<uint8_t, W> narrow_truth(Mask mask) {
  constexpr bool is_direct = W <= 4 || sizeof(Mask) <= 2 * W || sizeof(Mask) <= NARROWED_AT_ONCE;
  if constexpr (is_direct) {
    return __builtin_convertvector(-mask, Vec<uint8_t, W>);
  } else if constexpr (sizeof(Mask) == 8 * W) {
    return narrow_truth<W>(__builtin_convertvector(mask, Vec<int32_t, W>));
  } else {
    return narrow_truth<W>(__builtin_convertvector(mask, Vec<int16_t, W>));
  }
}

template <typename Mask, int W>
KORCH_INLINE Mask wide_truth(Vec<uint8_t, W> c) {
  if constexpr (W <= 4 || sizeof(Mask) <= 2 * W) {
    return __builtin_convertvector(c, Mask);
  } else if constexpr (sizeof(Mask) == 8 * W) {
    return __builtin_convertvector(wide_truth<Vec<int32_t, W>, W>(c), Mask);
  } else {
    return __builtin_convertvector(wide_truth<Vec<int16_t, W>, W>(c), Mask);
  }
}

#define KORCH_TRUTH(EXPRESSION)                                         \
  if constexpr (W == 1) return (EXPRESSION);                            \
  else return narrow_truth<W>(EXPRESSION);
#define KORCH_PREDICATE(NAME, EXPRESSION)                                \
  template <typename T, int W>                                          \
  KORCH_INLINE Vec<uint8_t, W> op_##NAME(Vec<T, W> x) {                 \
    [[maybe_unused]] Vec<T, W> zero = splat<T, W>(0);                   \
    KORCH_TRUTH(EXPRESSION)                                             \
  }
#define KORCH_RELATION(NAME, EXPRESSION)                                 \
  template <typename T, int W>                                          \
  KORCH_INLINE Vec<uint8_t, W> op_##NAME(Vec<T, W> x, Vec<T, W> y) {    \
    [[maybe_unused]] Vec<T, W> zero = splat<T, W>(0);                   \
    KORCH_TRUTH(EXPRESSION)                                             \
  }
KORCH_PREDICATE(not, x == zero)
KORCH_PREDICATE(isnan, x != x)
KORCH_PREDICATE(isinf, (x == x) & (x - x != x - x))
KORCH_RELATION(and, (x != zero) & (y != zero))
KORCH_RELATION(or, (x != zero) | (y != zero))
KORCH_RELATION(xor, (x != zero) ^ (y != zero))
KORCH_RELATION(equal, x == y)
KORCH_RELATION(less, x < y)
KORCH_RELATION(less_equal, x <= y)

// float32 uses the vector functions, float64 the C library lane by lane.
#define KORCH_FLOAT(NAME, DOUBLE)                                        \
  template <typename T, int W>                                          \
  KORCH_INLINE Vec<T, W> op_##NAME(Vec<T, W> a) {                       \
    if constexpr (sizeof(T) == 4) return NAME##_float<W>(a);            \
    else return lanewise<T, T, W>(a, [](T x) { return DOUBLE; });       \
  }
KORCH_FLOAT(exp, __builtin_exp(x))
KORCH_FLOAT(log, __builtin_log(x))
KORCH_FLOAT(erf, __builtin_erf(x))
KORCH_FLOAT(tanh, __builtin_tanh(x))
KORCH_FLOAT(sigmoid, 1 / (1 + __builtin_exp(-x)))

// The compiler turns a loop over an array in memory into one vector instruction if the CPU has it.
#define KORCH_ROUNDING(NAME)                                             \
  template <typename T, int W>                                          \
  KORCH_INLINE Vec<T, W> op_##NAME(Vec<T, W> a) {                       \
    if constexpr (W == 1) {                                             \
      if constexpr (sizeof(T) == 4) return KORCH_BUILTIN(NAME, f)(a);   \
      else return KORCH_BUILTIN(NAME, )(a);                             \
    } else {                                                            \
      alignas(64) T x[W];                                               \
      __builtin_memcpy(x, &a, sizeof(a));                               \
      for (int i = 0; i < W; ++i) x[i] = op_##NAME<T, 1>(x[i]);         \
      return load<T, W>(x);                                             \
    }                                                                   \
  }
#define KORCH_BUILTIN(NAME, SUFFIX) __builtin_##NAME##SUFFIX
KORCH_ROUNDING(sqrt)
KORCH_ROUNDING(floor)
KORCH_ROUNDING(ceil)
KORCH_ROUNDING(rint)

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_round(Vec<T, W> a) {
  return op_rint<T, W>(a);
}

template <typename T>
KORCH_INLINE T power(T x, T y) {
  if constexpr (sizeof(T) == 4 && !is_integer<T>) return __builtin_powf(x, y);
  else return static_cast<T>(__builtin_pow(static_cast<double>(x), static_cast<double>(y)));
}
KORCH_BINARY(pow, T, power<T>(x, y))
KORCH_UNARY(sin, T, __builtin_sin(x))
KORCH_UNARY(cos, T, __builtin_cos(x))
KORCH_UNARY(tan, T, __builtin_tan(x))
KORCH_UNARY(asin, T, __builtin_asin(x))
KORCH_UNARY(acos, T, __builtin_acos(x))
KORCH_UNARY(atan, T, __builtin_atan(x))
KORCH_UNARY(sinh, T, __builtin_sinh(x))
KORCH_UNARY(cosh, T, __builtin_cosh(x))
KORCH_UNARY(asinh, T, __builtin_asinh(x))
KORCH_UNARY(acosh, T, __builtin_acosh(x))
KORCH_UNARY(atanh, T, __builtin_atanh(x))

// Whether y is -1: dividing the least integer by it would trap, so the quotient is computed with wrap-around instead.
template <typename T>
KORCH_INLINE bool is_minus_one(T y) {
  return static_cast<T>(-1) < T(0) && y == static_cast<T>(-1);
}

template <typename T>
KORCH_INLINE T modulo(T x, T y) {
  if constexpr (is_integer<T>) {
    if (y == 0 || is_minus_one(y)) return 0;
    T r = static_cast<T>(x % y);
    return r != 0 && ((r < 0) != (y < 0)) ? static_cast<T>(r + y) : r;
  } else {
    return static_cast<T>(__builtin_fmod(x, y));
  }
}
KORCH_BINARY(mod, T, modulo<T>(x, y))

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_bitwise_not(Vec<T, W> a) {
  return ~a;
}
template <typename T, int W>
KORCH_INLINE Vec<T, W> op_bitwise_and(Vec<T, W> a, Vec<T, W> b) {
  return a & b;
}
template <typename T, int W>
KORCH_INLINE Vec<T, W> op_bitwise_or(Vec<T, W> a, Vec<T, W> b) {
  return a | b;
}
template <typename T, int W>
KORCH_INLINE Vec<T, W> op_bitwise_xor(Vec<T, W> a, Vec<T, W> b) {
  return a ^ b;
}

// Shifts as in NumPy: for a count beyond the width, the result is 0, or -1 for a right shift of a negative number.
template <typename T>
KORCH_INLINE T shift_left(T x, T y) {
  const bool is_inside = y >= 0 && static_cast<uint64_t>(y) < sizeof(T) * 8;
  return is_inside ? static_cast<T>(static_cast<uint64_t>(x) << y) : T(0);
}
template <typename T>
KORCH_INLINE T shift_right(T x, T y) {
  const bool is_inside = y >= 0 && static_cast<uint64_t>(y) < sizeof(T) * 8;
  return is_inside ? static_cast<T>(x >> y) : static_cast<T>(x < 0 ? -1 : 0);
}
KORCH_BINARY(shift_left, T, shift_left<T>(x, y))
KORCH_BINARY(shift_right, T, shift_right<T>(x, y))

template <typename T>
KORCH_INLINE T divide(T x, T y) {
  asm("" : "+r"(y));  // GCC 12 turns x / x into x != 0, and a vector of these into masks: -1 instead of 1
  if (y == 0) return 0;  // lanes that a guard excludes hold 0
  if (is_minus_one(y)) return static_cast<T>(0 - static_cast<uint64_t>(x));
  return static_cast<T>(x / y);
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_div(Vec<T, W> a, Vec<T, W> b) {
  if constexpr (is_integer<T>) {
    return lanewise<T, T, W>(a, b, [](T x, T y) { return divide<T>(x, y); });
  } else {
    return a / b;
  }
}

// a / 2^BITS for integers, rounded towards 0.
template <typename T, int W, int BITS>
KORCH_INLINE Vec<T, W> div_by_power(Vec<T, W> a) {
  if constexpr (static_cast<T>(-1) < 0) a += (a >> (8 * sizeof(T) - 1)) & static_cast<T>((T{1} << BITS) - 1);
  return a >> BITS;
}

// a / b for a scalar b: a product with its inverse, which is computed once for many vectors, if the inverse is a
// normal number. The result is rounded twice.
template <typename T, int W>
KORCH_INLINE Vec<T, W> div_nearly_by(Vec<T, W> a, T b) {
  if constexpr (sizeof(T) == 4 && !is_integer<T> && W > 1) {
    const T size = b < 0 ? -b : b;
    if (size >= 0x1p-126f && size <= 0x1p126f) return a * splat<T, W>(1 / b);
  }
  return op_div<T, W>(a, splat<T, W>(b));
}

// The same, but rounded as a division: a later rounding or comparison may depend on the last bit. The error
// of the product q is subtracted: q b - a is exact in one fused operation, and q minus that times the inverse is
// the correctly rounded quotient (P. Markstein, IBM Journal of Research and Development 34, 1990, theorem 7).
// An infinite q is left unchanged, as its error is unknown.
template <typename T, int W>
KORCH_INLINE Vec<T, W> div_by(Vec<T, W> a, T b) {
#if defined(__FMA__) || defined(__aarch64__)
  if constexpr (sizeof(T) == 4 && !is_integer<T> && W > 1) {
    if (b >= 0x1p-126f && b <= 0x1p126f) {  // for a negative b, a zero would lose its sign
      // For a finite q, the rest is less than b 2^106; subtracting at most that much leaves an infinite q infinite.
      const Vec<T, W> inverse = splat<T, W>(1 / b), most = splat<T, W>(b < 0x1p20f ? b * 0x1p106f : 0x1p126f);
      const Vec<T, W> q = a * inverse, rest = q * splat<T, W>(b) - a;
      return q - less_of<T, W>(greater_of<T, W>(rest, -most), most) * inverse;
    }
  }
#endif
  return op_div<T, W>(a, splat<T, W>(b));
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_where(Vec<uint8_t, W> c, Vec<T, W> a, Vec<T, W> b) {
  if constexpr (W == 1) {
    return c ? a : b;
  } else {
    typedef decltype(a == b) Mask;
    return wide_truth<Mask, W>(c) != 0 ? a : b;
  }
}

template <typename T, int W>
KORCH_INLINE Vec<uint8_t, W> to_bool(Vec<T, W> x) {
  Vec<T, W> zero = splat<T, W>(0);
  KORCH_TRUTH(x != zero)
}

template <typename T, int W> KORCH_INLINE Vec<T, W> combine_sum(Vec<T, W> a, Vec<T, W> b) { return a + b; }
template <typename T, int W> KORCH_INLINE Vec<T, W> combine_prod(Vec<T, W> a, Vec<T, W> b) { return a * b; }

// NaN if `b` is NaN, else `chosen` (which is `a` if that is NaN): one instruction if the CPU has it.
template <typename T, int W>
KORCH_INLINE Vec<T, W> unless_nan(Vec<T, W> chosen, Vec<T, W> b) {
#if defined(__AVX512F__)
  if constexpr (W == 16 && sizeof(T) == 4) {
    const Vec<int32_t, W> keep_nan = splat<int32_t, W>(0x22);  // NaN from b, all else from chosen
    return __builtin_ia32_fixupimmps512_mask(chosen, b, keep_nan, 0, -1, 4);
  }
#if defined(__AVX512VL__)
  if constexpr (W == 8 && sizeof(T) == 4) {
    const Vec<int32_t, W> keep_nan = splat<int32_t, W>(0x22);
    return __builtin_ia32_fixupimmps256_mask(chosen, b, keep_nan, 0, -1);
  }
#endif
#endif
  return b != b ? b : chosen;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> combine_max(Vec<T, W> a, Vec<T, W> b) {
  if constexpr (is_integer<T>) return op_max<T, W>(a, b);
  else return unless_nan<T, W>(greater_of<T, W>(b, a), b);
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> combine_min(Vec<T, W> a, Vec<T, W> b) {
  if constexpr (is_integer<T>) return op_min<T, W>(a, b);
  else return unless_nan<T, W>(less_of<T, W>(b, a), b);
}

#define KORCH_ACROSS(NAME)                                                        \
  template <typename T, int W>                                                   \
  KORCH_INLINE T across_##NAME(Vec<T, W> a) {                                    \
    if constexpr (W == 1) {                                                      \
      return a;                                                                  \
    } else {                                                                     \
      Vec<T, W / 2> low, high;                                                   \
      __builtin_memcpy(&low, &a, sizeof(low));                                   \
      __builtin_memcpy(&high, reinterpret_cast<const char*>(&a) + sizeof(low), sizeof(high)); \
      return across_##NAME<T, W / 2>(combine_##NAME<T, W / 2>(low, high));       \
    }                                                                            \
  }
KORCH_ACROSS(sum)
KORCH_ACROSS(prod)
KORCH_ACROSS(max)
KORCH_ACROSS(min)

}  // namespace korch
