// What the printed tile programs call, on top of the vector mathematics of korch_vector.h.
// A value of W lanes of type T is a Vec<T, W>; with one lane it is a T. Truth values are uint8_t.
#pragma once

#include <stdint.h>

namespace korch {

#define KORCH_INLINE inline __attribute__((always_inline))

template <typename T, int W>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * W), may_alias));
};
template <typename T>
struct VecOf<T, 1> {
  typedef T type;
};
template <typename T, int W>
using Vec = typename VecOf<T, W>::type;

template <typename T>
inline constexpr bool is_integer = static_cast<T>(0.5) == T(0);

KORCH_INLINE long smaller(long a, long b) { return a < b ? a : b; }
KORCH_INLINE long larger(long a, long b) { return a > b ? a : b; }

// How many blocks of `unit` hold n.
constexpr long blocks(long n, long unit) { return (n + unit - 1) / unit; }

template <typename T, int W>
KORCH_INLINE Vec<T, W> load(const T* at) {
  Vec<T, W> x;
  __builtin_memcpy(&x, at, sizeof(x));
  return x;
}

template <typename T, int W>
KORCH_INLINE void store(T* at, Vec<T, W> x) {
  __builtin_memcpy(at, &x, sizeof(x));
}

// Write a vector past the caches if the address is a multiple of its size; else as any other. Behind such
// writes stands `end_streams`, before another thread may read them.
template <typename T, int W>
KORCH_INLINE void stream(T* at, Vec<T, W> x) {
  if constexpr (W > 1) {
    if (reinterpret_cast<uintptr_t>(at) % sizeof(x) == 0) {
#if __has_builtin(__builtin_nontemporal_store)
      return __builtin_nontemporal_store(x, reinterpret_cast<Vec<T, W>*>(at));
#else
#if defined(__AVX512F__)
      typedef float V16 __attribute__((vector_size(64)));
      if constexpr (sizeof(x) == 64) return __builtin_ia32_movntps512(reinterpret_cast<float*>(at), reinterpret_cast<V16>(x));
#endif
#if defined(__AVX__)
      typedef float V8 __attribute__((vector_size(32)));
      if constexpr (sizeof(x) == 32) return __builtin_ia32_movntps256(reinterpret_cast<float*>(at), reinterpret_cast<V8>(x));
#endif
#endif
    }
  }
  store<T, W>(at, x);
}

KORCH_INLINE void end_streams() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// How many elements there are before the next line of a cache.
template <typename T>
KORCH_INLINE long before_line(const T* at) {
  return static_cast<long>((0 - reinterpret_cast<uintptr_t>(at)) % 64 / sizeof(T));
}

// How many elements there are from the last line's begin on.
template <typename T>
KORCH_INLINE long after_line(const T* at) {
  return static_cast<long>(reinterpret_cast<uintptr_t>(at) % 64 / sizeof(T));
}

// Write elements from a place that lies as far behind a line's begin: whole lines past the caches.
template <typename T, int W>
KORCH_INLINE void stream_piece(T* to, const T* from, long count) {
  constexpr long LINE = 64 / sizeof(T);
  long i = 0;
  for (const long head = smaller(before_line(to), count); i < head; ++i) to[i] = from[i];
  for (; i + LINE <= count; i += LINE) {
#pragma GCC unroll 16
    for (long k = 0; k < LINE; k += W) stream<T, W>(to + i + k, load<T, W>(from + i + k));
  }
  for (; i < count; ++i) to[i] = from[i];
}

// Load, and prefetch the element at a distance `ahead`, which a later task reads. S is the type in memory, which
// may be narrower than T.
template <typename T, int W, typename S>
KORCH_INLINE Vec<T, W> load_ahead(const S* at, long ahead) {
  if constexpr (W > 1) __builtin_prefetch(at + ahead);
  return load<T, W>(at);
}

// Load, and prefetch the element at a distance `ahead` from memory into L2: in L1 it would be evicted
// before it is read.
template <typename T, int W, typename S>
KORCH_INLINE Vec<T, W> load_far(const S* at, long ahead) {
  if constexpr (W > 1) __builtin_prefetch(at + ahead, 0, 2);
  return load<T, W>(at);
}

// Fetch what a vector of a later task begins with.
template <int W, typename T>
KORCH_INLINE void fetch(const T* at) {
  if constexpr (W > 1) __builtin_prefetch(at);
}

// Fetch a line that will be written, for this core alone. Where it is not known, the instruction does nothing.
template <int W, typename T>
KORCH_INLINE void fetch_to_write(T* at) {
  if constexpr (W > 1) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*at));  // what compilers make of the builtin may only read
#else
    __builtin_prefetch(at, 1);
#endif
  }
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> splat(T x) {
  if constexpr (W == 1) return x;
  else return x - Vec<T, W>{};
}

template <typename T, int W>
KORCH_INLINE T lane(Vec<T, W> x, int i) {
  if constexpr (W == 1) return x;
  else return x[i];
}

template <typename T, int W>
KORCH_INLINE void scatter(T* at, long step, Vec<T, W> x) {
  for (int i = 0; i < W; ++i) at[i * step] = lane<T, W>(x, i);
}

// Lanes 0 to N - 1, as a pack.
template <int... I>
struct Lanes {};
template <int N, int... I>
struct LanesTo {
  typedef typename LanesTo<N - 1, N - 1, I...>::type type;
};
template <int... I>
struct LanesTo<0, I...> {
  typedef Lanes<I...> type;
};

template <typename T, int W, int... I>
KORCH_INLINE Vec<T, W> every_second(const T* at, Lanes<I...>) {
  const Vec<T, W> a = load<T, W>(at), b = load<T, W>(at + W - 1);  // nothing beyond the last is read
  return __builtin_shufflevector(a, b, (I < W / 2 ? 2 * I : 2 * I + 1)...);
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> strided(const T* at, long step) {
  if constexpr (W == 1) {
    return *at;
  } else {
    if (step == 2) return every_second<T, W>(at, typename LanesTo<W>::type());
    Vec<T, W> x;
    for (int i = 0; i < W; ++i) x[i] = at[i * step];
    return x;
  }
}

template <typename T, int W, int... I>
KORCH_INLINE Vec<T, 2 * W> joined(Vec<T, W> a, Vec<T, W> b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, I...);
}

// Rows 0, 4, 8, ... of four elements each, one after another: what is loaded into a part of a register
// costs no shuffle.
template <typename T, int W>
KORCH_INLINE Vec<T, W> fourth_rows(const T* at, long step) {
  if constexpr (W == 4) {
    return load<T, 4>(at);
  } else {
    const Vec<T, W / 2> a = fourth_rows<T, W / 2>(at, step), b = fourth_rows<T, W / 2>(at + W / 2 * step, step);
    return joined<T, W / 2>(a, b, typename LanesTo<W>::type());
  }
}

// Transpose the 4 x 4 elements that four vectors have in each part of four lanes.
template <typename T, int W, int... I>
KORCH_INLINE void transpose_parts(const Vec<T, W> (&x)[4], Vec<T, W>* to, Lanes<I...>) {
  Vec<T, W> y[4];
  for (int i = 0; i < 2; ++i) {  // lanes 0 and 1, then 2 and 3, of each part, of two vectors in turn
    y[2 * i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], (I / 4 * 4 + I % 4 / 2 + I % 2 * W)...);
    y[2 * i + 1] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], (I / 4 * 4 + I % 4 / 2 + I % 2 * W + 2)...);
  }
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = __builtin_shufflevector(y[i], y[i + 2], (I / 4 * 4 + I % 2 + I % 4 / 2 * W)...);
    to[2 * i + 1] = __builtin_shufflevector(y[i], y[i + 2], (I / 4 * 4 + I % 2 + I % 4 / 2 * W + 2)...);
  }
}

// Element i of vector j is at[i * step + j], for four-byte elements. COUNT is a multiple of 4.
template <typename T, int W, int COUNT>
KORCH_INLINE void load_across(Vec<T, W> (&to)[COUNT], const T* at, long step) {
  if constexpr (W == 1) {
    for (int j = 0; j < COUNT; ++j) to[j] = at[j];
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < COUNT; j += 4) {
      Vec<T, W> x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) x[i] = fourth_rows<T, W>(at + i * step + j, step);
      transpose_parts<T, W>(x, to + j, typename LanesTo<W>::type());
    }
  }
}

// Fetch the lines in which `load_across` begins to read.
template <int W, typename T>
KORCH_INLINE void fetch_across(const T* at, long step) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) __builtin_prefetch(at + i * step);
}

// The same, but not into the first cache.
template <int W, typename T>
KORCH_INLINE void fetch_far_across(const T* at, long step) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) __builtin_prefetch(at + i * step, 0, 2);
}

// The W elements of each of ROWS rows, one after another in memory, combined to one.
template <typename T, int ROWS, int W, typename Combine>
KORCH_INLINE Vec<T, ROWS> fold(const T* part, Combine combine) {
  Vec<T, ROWS> x[W];
  load_across<T, ROWS, W>(x, part, W);
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) x[i] = combine(x[i], x[i + half]);
  }
  return x[0];
}

// The elements at index(i), index(i + 1), ...
template <typename T, int W, typename Index>
KORCH_INLINE Vec<T, W> gather(const T* from, Index index, long i) {
  if constexpr (W == 1) {
    return from[index(i)];
  } else {
    Vec<T, W> x;
    for (int k = 0; k < W; ++k) x[k] = from[index(i + k)];
    return x;
  }
}

// The elements at `at` and each of W entries of a table, where entries grow by 0 or 1: one vector is
// read and permuted. It stays inside of the `size` elements of the buffer, which are at least W.
template <typename T, int W>
KORCH_INLINE Vec<T, W> spread(const T* from, long size, long at, const int32_t* table) {
  if constexpr (W == 1) {
    return from[at + *table];
  } else {
    const long first = smaller(at + *table, size - W);
    const Vec<int32_t, W> lanes = load<int32_t, W>(table) + static_cast<int32_t>(at - first);
#if __has_builtin(__builtin_shuffle)
    return __builtin_shuffle(load<T, W>(from + first), lanes);
#else
    Vec<T, W> x;
    for (int k = 0; k < W; ++k) x[k] = from[first + lanes[k]];
    return x;
#endif
  }
}

// a > b ? a : b, which is b if either is NaN, in one instruction where there is one: GCC makes a
// comparison and a choice, and Clang has no such builtin but makes that instruction.
template <typename T, int W>
KORCH_INLINE Vec<T, W> greater_of(Vec<T, W> a, Vec<T, W> b) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (W == 16 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_maxps512_mask(a, b, a, -1, 4);
#endif
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (W == 8 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_maxps256(a, b);
  if constexpr (W == 4 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_maxps(a, b);
#endif
  return a > b ? a : b;
}

// a < b ? a : b, in the same way.
template <typename T, int W>
KORCH_INLINE Vec<T, W> less_of(Vec<T, W> a, Vec<T, W> b) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (W == 16 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_minps512_mask(a, b, a, -1, 4);
#endif
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (W == 8 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_minps256(a, b);
  if constexpr (W == 4 && sizeof(T) == 4 && !is_integer<T>) return __builtin_ia32_minps(a, b);
#endif
  return a < b ? a : b;
}

template <typename To, typename From, int W>
KORCH_INLINE Vec<To, W> cast(Vec<From, W> x) {
  if constexpr (W == 1) return static_cast<To>(x);
  else return __builtin_convertvector(x, Vec<To, W>);
}

}  // namespace korch

#include "korch_math.h"

namespace korch {

// Elementwise operations by their names in the primitive table. Those of korch_vector.h serve
// whole vectors; the others go lane by lane.
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

// GCC's vector extensions choose lanes with ?: between vectors; a scalar needs the same text.
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
  Vec<T, W> larger = greater_of<T, W>(b, a);  // a if either is NaN: what is left to ask of a literal b is known
  if constexpr (is_integer<T>) return larger;
  else return b != b ? b : larger;
}

template <typename T, int W>
KORCH_INLINE Vec<T, W> op_min(Vec<T, W> a, Vec<T, W> b) {
  Vec<T, W> smaller = less_of<T, W>(b, a);
  if constexpr (is_integer<T>) return smaller;
  else return b != b ? b : smaller;
}

// A comparison of vectors gives -1 in each lane where it holds; truth values are 1. Lanes of vectors that
// are not short are halved or doubled step by step: where there is no instruction for the whole way, GCC
// 12 goes lane by lane.
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

// float32 goes through the vector functions, float64 lane by lane through the C library.
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

// A loop over an array in memory becomes one vector instruction where there is one.
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

// Whether an integer division by y would trap if x is the least number: the quotient wraps instead.
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

// As NumPy has it: beyond the width nothing is left but the sign.
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
  asm("" : "+r"(y));  // GCC 12 takes x / x for x != 0, and a vector of these for masks: -1 instead of 1
  if (y == 0) return 0;  // a lane that a guard left out holds 0
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

// a / b for a number b: by its inverse, found once for many vectors, if that is a normal number. It has
// two roundings.
template <typename T, int W>
KORCH_INLINE Vec<T, W> div_nearly_by(Vec<T, W> a, T b) {
  if constexpr (sizeof(T) == 4 && !is_integer<T> && W > 1) {
    const T size = b < 0 ? -b : b;
    if (size >= 0x1p-126f && size <= 0x1p126f) return a * splat<T, W>(1 / b);
  }
  return op_div<T, W>(a, splat<T, W>(b));
}

// The same rounded as a division does it: what is rounded or compared next may hang on the last bit, so
// the product's error is taken off: q b - a is exact in one operation, and q less its share of that is the
// quotient as a division rounds it (P. Markstein, IBM Journal of Research and Development 34, 1990,
// theorem 7). Of an infinite q nothing is known to take off.
template <typename T, int W>
KORCH_INLINE Vec<T, W> div_by(Vec<T, W> a, T b) {
#if defined(__FMA__) || defined(__aarch64__)
  if constexpr (sizeof(T) == 4 && !is_integer<T> && W > 1) {
    if (b >= 0x1p-126f && b <= 0x1p126f) {  // of a negative one, a zero would lose its sign
      // Of a finite q the rest is less than b 2^106, and taking that much off leaves an infinite one.
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

// `chosen`, which is `a` if that is NaN, and NaN if `b` is: one instruction where there is one.
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
