// Vectors of any width and the operations that move data: loads, stores, transposes, prefetches, conversions.
// A value of W lanes of type T is a Vec<T, W>; with one lane it is a T.
#pragma once

#include <stdint.h>

#define KORCH_INLINE inline __attribute__((always_inline))
// Not inlined, so that all registers are available to the function's loop.
#define KORCH_ALONE __attribute__((noinline))

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

// Keeps a loaded vector in a register where a compiler would otherwise load it again for each use. Not used where
// software emulates matrix units, because a vector may then be larger than a register.
#if defined(__x86_64__) && !defined(KORCH_AMX_IN_SOFTWARE)
#define KORCH_KEEP(x) asm("" : "+v"(x))
#elif defined(__aarch64__)
#define KORCH_KEEP(x) asm("" : "+w"(x))
#else
#define KORCH_KEEP(x)
#endif

namespace korch {

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

KORCH_INLINE constexpr long smaller(long a, long b) { return a < b ? a : b; }

// Write the positions of `count` rows. Rows come in groups of `part`, which are stored with a pitch of `whole` rows; the
// first row is number `at` of its group and has position 0.
inline void place_rows(int32_t* to, long count, long at, long part, long whole) {
  for (long i = 0, gap = 0; i < count; ++i) {
    to[i] = static_cast<int32_t>(i + gap);
    if (++at == part) at = 0, gap += whole - part;
  }
}
KORCH_INLINE constexpr long larger(long a, long b) { return a > b ? a : b; }

// The position of an index, which counts from the end if it is negative; the nearest position if there is none. Most indices
// are positions: with a branch that is predicted, the load at the position does not wait for the comparisons.
KORCH_INLINE long nearest(long index, long count) {
  if (__builtin_expect(static_cast<unsigned long>(index) < static_cast<unsigned long>(count), 1)) return index;
  return larger(0, smaller(index < 0 ? index + count : index, count - 1));
}

// The number of blocks of `unit` elements that hold n elements.
constexpr long blocks(long n, long unit) { return (n + unit - 1) / unit; }

template <typename T, int W>
KORCH_INLINE Vec<T, W> load(const T* at) {
  Vec<T, W> x;
  __builtin_memcpy(&x, at, sizeof(x));
  return x;
}

// The first `count` elements, padded with zeros; memory beyond them is not read. S is the type in memory.
template <typename T, int W, typename S>
KORCH_INLINE Vec<T, W> load_some(const S* at, long count) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef float V16 __attribute__((vector_size(64)));
  if constexpr (W == 16 && sizeof(S) == 4 && sizeof(T) == 4)
    return Vec<T, W>(__builtin_ia32_loadups512_mask(reinterpret_cast<const float*>(at), V16{}, (1u << count) - 1));
#endif
  alignas(64) T x[W] = {};
  for (long j = 0; j < count; ++j) x[j] = static_cast<T>(at[j]);
  return load<T, W>(x);
}

template <typename T, int W>
KORCH_INLINE void store(T* at, Vec<T, W> x) {
  __builtin_memcpy(at, &x, sizeof(x));
}

// Store a vector with a non-temporal store, which bypasses the caches, if the address is a multiple of its size; else
// with an ordinary store. `end_streams` must be called before another thread may read what was stored.
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

// The number of elements from `at` to the next cache-line boundary.
template <typename T>
KORCH_INLINE long before_line(const T* at) {
  return static_cast<long>((0 - reinterpret_cast<uintptr_t>(at)) % 64 / sizeof(T));
}

// The number of elements from the previous cache-line boundary to `at`.
template <typename T>
KORCH_INLINE long after_line(const T* at) {
  return static_cast<long>(reinterpret_cast<uintptr_t>(at) % 64 / sizeof(T));
}

// Copy elements, whole cache lines with non-temporal stores. `from` must have the same offset within a line as `to`.
template <typename T, int W>
KORCH_INLINE void stream_span(T* to, const T* from, long count) {
  constexpr long LINE = 64 / sizeof(T);
  long i = 0;
  for (const long head = smaller(before_line(to), count); i < head; ++i) to[i] = from[i];
  for (; i + LINE <= count; i += LINE) {
#pragma GCC unroll 16
    for (long k = 0; k < LINE; k += W) stream<T, W>(to + i + k, load<T, W>(from + i + k));
  }
  for (; i < count; ++i) to[i] = from[i];
}

// Load, and prefetch the element `ahead` elements later, which a later task reads. S is the type in memory, which
// may be narrower than T.
template <typename T, int W, typename S>
KORCH_INLINE Vec<T, W> load_ahead(const S* at, long ahead) {
  if constexpr (W > 1) __builtin_prefetch(at + ahead);
  return load<T, W>(at);
}

// Load, and prefetch the element `ahead` elements later, but not into the level-1 cache: it would be
// evicted before it is read.
template <typename T, int W, typename S>
KORCH_INLINE Vec<T, W> load_far(const S* at, long ahead) {
  if constexpr (W > 1) __builtin_prefetch(at + ahead, 0, 2);
  return load<T, W>(at);
}

// Prefetch the first cache line of a vector that a later task reads.
template <int W, typename T>
KORCH_INLINE void fetch(const T* at) {
  if constexpr (W > 1) __builtin_prefetch(at);
}

// Prefetch a cache line that will be written, in exclusive state. CPUs without the instruction ignore it.
template <int W, typename T>
KORCH_INLINE void fetch_to_write(T* at) {
  if constexpr (W > 1) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*at));  // the builtin may compile to a prefetch for reading
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
  const Vec<T, W> a = load<T, W>(at), b = load<T, W>(at + W - 1);  // memory beyond the last element is not read
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

// Rows 0, 4, 8, ... of four elements each, concatenated. Each row is loaded directly into its part of the register,
// which needs no shuffle.
template <typename T, int W>
KORCH_INLINE Vec<T, W> fourth_rows(const T* at, long step) {
  if constexpr (W == 4) {
    return load<T, 4>(at);
  } else {
    const Vec<T, W / 2> a = fourth_rows<T, W / 2>(at, step), b = fourth_rows<T, W / 2>(at + W / 2 * step, step);
    return joined<T, W / 2>(a, b, typename LanesTo<W>::type());
  }
}

// Transpose the 4 x 4 block that each group of four lanes forms across four vectors.
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

// Prefetch the first cache line of each row that `load_across` reads.
template <int W, typename T>
KORCH_INLINE void fetch_across(const T* at, long step) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) __builtin_prefetch(at + i * step);
}

// The same, but not into the level-1 cache.
template <int W, typename T>
KORCH_INLINE void fetch_far_across(const T* at, long step) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) __builtin_prefetch(at + i * step, 0, 2);
}

// Combine the W elements of each of ROWS contiguous rows into one element.
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

// The elements at offsets `at` + table[0], ..., `at` + table[W - 1], where consecutive entries differ by 0 or 1, so that
// one vector is loaded and permuted. The load stays within the `size` elements of the buffer, which are at least W.
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

// a > b ? a : b, which is b if either is NaN, by one instruction if the CPU has it. GCC would generate a comparison
// and a blend; Clang has no such builtin but generates that instruction from the expression.
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

// Bytes widened to numbers of 16 or 32 bits. GCC 12 would convert half of them at a time, or one by one.
template <typename To, typename From, int W>
KORCH_INLINE Vec<To, W> extended(Vec<From, W> x) {
  constexpr bool is_signed = static_cast<From>(-1) < 0;
#if defined(__AVX2__) && !defined(__clang__)
  typedef char Bytes __attribute__((vector_size(16)));
  if constexpr (W == 8 && sizeof(To) == 4) {
    typedef long long Words __attribute__((vector_size(16)));
    const Bytes low = Bytes(Words{__builtin_bit_cast(long long, x), 0});
    if constexpr (is_signed) return Vec<To, W>(__builtin_ia32_pmovsxbd256(low));
    else return Vec<To, W>(__builtin_ia32_pmovzxbd256(low));
  }
  if constexpr (W == 16 && sizeof(To) == 2) {
    if constexpr (is_signed) return Vec<To, W>(__builtin_ia32_pmovsxbw256(Bytes(x)));
    else return Vec<To, W>(__builtin_ia32_pmovzxbw256(Bytes(x)));
  }
#endif
#if defined(__AVX512BW__) && !defined(__clang__)
  if constexpr (W == 16 && sizeof(To) == 4) {
    typedef int V16 __attribute__((vector_size(64)));
    if constexpr (is_signed) return Vec<To, W>(__builtin_ia32_pmovsxbd512_mask(Bytes(x), V16{}, -1));
    else return Vec<To, W>(__builtin_ia32_pmovzxbd512_mask(Bytes(x), V16{}, -1));
  }
  if constexpr (W == 32 && sizeof(To) == 2) {
    typedef char Bytes32 __attribute__((vector_size(32)));
    typedef short V32 __attribute__((vector_size(64)));
    if constexpr (is_signed) return Vec<To, W>(__builtin_ia32_pmovsxbw512_mask(Bytes32(x), V32{}, -1));
    else return Vec<To, W>(__builtin_ia32_pmovzxbw512_mask(Bytes32(x), V32{}, -1));
  }
#endif
  return __builtin_convertvector(x, Vec<To, W>);
}

// The lowest bytes of numbers of 32 bits.
template <typename To, int W>
KORCH_INLINE Vec<To, W> lowest_bytes(Vec<int32_t, W> x) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char Bytes __attribute__((vector_size(16)));
  if constexpr (W == 16) return Vec<To, W>(__builtin_ia32_pmovdb512_mask(x, Bytes{}, -1));
#endif
#if defined(__AVX2__) && !defined(__clang__)
  if constexpr (W == 8) {
    typedef char Bytes32 __attribute__((vector_size(32)));
    const Bytes32 firsts = {0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                            0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    typedef int32_t Half __attribute__((vector_size(16)));
    const auto both = __builtin_bit_cast(Vec<int32_t, 8>, __builtin_ia32_pshufb256(Bytes32(x), firsts));
    const Half low = __builtin_shufflevector(both, both, 0, 1, 2, 3), high = __builtin_shufflevector(both, both, 4, 5, 6, 7);
    typedef long long Words __attribute__((vector_size(16)));
    return __builtin_bit_cast(Vec<To, W>, Words(__builtin_shufflevector(low, high, 0, 4, 1, 5))[0]);
  }
#endif
  // In two steps: for a direct conversion, GCC 12 generates scalar code for each lane.
  return __builtin_convertvector(__builtin_convertvector(x, Vec<int16_t, W>), Vec<To, W>);
}

template <typename To, typename From, int W>
KORCH_INLINE Vec<To, W> cast(Vec<From, W> x) {
  if constexpr (W == 1) {
    return static_cast<To>(x);
  } else if constexpr (sizeof(To) == 1 && sizeof(From) == 4 && W >= 8) {
    return lowest_bytes<To, W>(__builtin_convertvector(x, Vec<int32_t, W>));
  } else if constexpr (sizeof(To) == 2 && sizeof(From) == 1) {
    return extended<To, From, W>(x);
  } else if constexpr (sizeof(To) == 4 && sizeof(From) == 1) {
    return __builtin_convertvector((extended<int32_t, From, W>(x)), Vec<To, W>);
  } else {
    return __builtin_convertvector(x, Vec<To, W>);
  }
}

}  // namespace korch
