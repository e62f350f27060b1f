// Tasks of a product on the matrix units, which multiply numbers split into pieces (korch_amx.h).
//
// With the matrix units either blocks of rows stay in the cache as pieces, while one strip of columns
// after another is split and multiplied by all of them; or a group of strips stays, and the rows go by.
// A thread's workspace has two strips packed, the pieces of rows and of columns, and the sums of a task
// if its terms are multiplied in chunks. Where several parts have the same rows, they share the pieces.
#pragma once

#include "korch_amx.h"
#include "korch_gemm_tile.h"

namespace korch_gemm {

inline constexpr long TOGETHER = 2 * korch_amx::EDGE, SUMS = TOGETHER * TOGETHER;
constexpr long ceil_of(long n, long unit) { return (n + unit - 1) / unit; }

template <class K>
struct Room {
  static constexpr bool IS_SHARED = K::PARTS > 1 && K::GROUP == 0;
  static constexpr long STEPS = ceil_of(K::CHUNK, korch_amx::TERMS), ALL_STEPS = ceil_of(K::DEPTH, korch_amx::TERMS);
  static constexpr long BLOCKS = ceil_of(K::BLOCK, TOGETHER), ALL_BLOCKS = ceil_of(K::M, TOGETHER);
  static constexpr long STRIPS = ceil_of(K::N, COLUMNS<K> * K::PARTS) + 1;
  static constexpr long PIECES = STEPS * korch_amx::STEP, ALL_PIECES = ALL_STEPS * korch_amx::STEP;
  static constexpr bool KEEPS_SUMS = K::CHUNK < K::DEPTH;
  // In floats, each of which has room for two numbers of a piece.
  static constexpr long PACKED = K::B_COLUMN != 0 ? 2 * K::DEPTH * COLUMNS<K> : 0;
  static constexpr long LEFT = IS_SHARED ? 0 : (K::GROUP ? 2 : BLOCKS) * PIECES / 2;
  static constexpr long RIGHT = (K::GROUP ? K::GROUP : 2) * PIECES / 2;
  static constexpr long OWN = PACKED + LEFT + RIGHT + (KEEPS_SUMS ? BLOCKS * STRIPS * SUMS : 0);
};

// What a thread needs of its workspace.
template <class K>
struct Own {
  float* packed;
  uint16_t *left, *right;
  float* sums;
  Own(float* from)
      : packed(from), left(reinterpret_cast<uint16_t*>(from + Room<K>::PACKED)),
        right(left + 2 * Room<K>::LEFT), sums(from + Room<K>::PACKED + Room<K>::LEFT + Room<K>::RIGHT) {}
};

template <class K>
KORCH_INLINE korch_amx::Splitter rows_to_split(const float* a, long m, long k, long terms, uint16_t* to) {
  return korch_amx::splitter(a + m * K::A_STEP + k, K::A_STEP, korch::smaller(TOGETHER, K::M - m), terms, to);
}

template <bool IS_ROWS>
KORCH_INLINE void multiply(const uint16_t* a, const uint16_t* b, long rows, long steps, float* sums, bool adds,
                           korch_amx::Splitter& next) {
  if (rows > korch_amx::EDGE) korch_amx::multiply<2, IS_ROWS>(a, b, steps, sums, adds, next);
  else korch_amx::multiply<1, IS_ROWS>(a, b, steps, sums, adds, next);
}

// Store the sums of rows [m, end) and columns from n on. What is no number may have been too large
// for pieces, so it is computed once more.
template <class K>
KORCH_INLINE void finish_sums(void* const* buffers, const Task& t, float* packed, const float* sums, long m, long end,
                              long n) {
  if (!korch_amx::are_finite(sums, (end - m) * TOGETHER)) {
    rows<K>(buffers, t.a, find_strip<K>(t.b, n, packed), {nullptr, 0}, t.i, m, end, n);
    return;
  }
  if (K::N % COLUMNS<K> != 0 && n + COLUMNS<K> > K::N) {
    finish_edge<K>(buffers, sums, end - m, t.i, m, n);
    return;
  }
  for (; m < end; ++m, sums += TOGETHER)
#pragma GCC unroll 2
    for (int v = 0; v < K::NV; ++v)
      K::template finish<K::W>(buffers, korch::load<float, K::W>(sums + v * K::W), t.i, m, n + v * K::W);
}

// A task whose rows stay. `shared` has the pieces of all rows, or none.
template <class K>
inline void pass_columns(void* const* buffers, const Task& t, const Own<K>& own, const uint16_t* shared) {
  typedef Room<K> R;
  const long blocks = ceil_of(t.end - t.begin, TOGETHER);
  for (long k = 0; k < K::DEPTH; k += K::CHUNK) {
    const long terms = korch::smaller(K::CHUNK, K::DEPTH - k), steps = ceil_of(terms, korch_amx::TERMS);
    if constexpr (!R::IS_SHARED)
      for (long r = 0; r < blocks; ++r)
        korch_amx::split_all<true>(rows_to_split<K>(t.a, t.begin + r * TOGETHER, k, terms, own.left + r * R::PIECES));
    const auto columns = [&](long s) {
      const Strip strip = find_strip<K>(t.b, s * COLUMNS<K>, own.packed + s % 2 * (R::PACKED / 2));
      return korch_amx::splitter(strip.from + k * strip.step, strip.step, TOGETHER, terms, own.right + s % 2 * R::PIECES);
    };
    korch_amx::split_all<false>(columns(t.first));
    for (long s = t.first; s < t.last; ++s) {
      korch_amx::Splitter next{};
      if (s + 1 < t.last) {
        next = columns(s + 1);
        next.each = korch_amx::parts_beside(blocks);
      }
      for (long r = 0; r < blocks; ++r) {
        const long m = t.begin + r * TOGETHER, end = korch::smaller(m + TOGETHER, t.end);
        alignas(64) float lone[SUMS];
        float* const sums = R::KEEPS_SUMS ? own.sums + ((s - t.first) * R::BLOCKS + r) * SUMS : lone;
        const uint16_t* const left =
            R::IS_SHARED ? shared + m / TOGETHER * R::ALL_PIECES + k / korch_amx::TERMS * korch_amx::STEP
                         : own.left + r * R::PIECES;
        multiply<false>(left, own.right + s % 2 * R::PIECES, end - m, steps, sums, k > 0, next);
        if (k + K::CHUNK >= K::DEPTH) finish_sums<K>(buffers, t, own.packed + s % 2 * (R::PACKED / 2), sums, m, end, s * COLUMNS<K>);
      }
    }
  }
}

// A task whose strips of columns stay, a group at a time.
template <class K>
inline void pass_rows(void* const* buffers, const Task& t, const Own<K>& own) {
  typedef Room<K> R;
  for (long first = t.first; first < t.last; first += K::GROUP) {
    const long strips = korch::smaller(K::GROUP, t.last - first);
    for (long s = 0; s < strips; ++s) {
      const Strip strip = find_strip<K>(t.b, (first + s) * COLUMNS<K>, own.packed);
      korch_amx::split_all<false>(korch_amx::splitter(strip.from, strip.step, TOGETHER, K::DEPTH, own.right + s * R::PIECES));
    }
    korch_amx::split_all<true>(rows_to_split<K>(t.a, t.begin, 0, K::DEPTH, own.left));
    uint16_t *left = own.left, *other = own.left + R::PIECES;
    for (long m = t.begin; m < t.end; m += TOGETHER) {
      const long end = korch::smaller(m + TOGETHER, t.end);
      korch_amx::Splitter next{};
      if (end < t.end) {
        next = rows_to_split<K>(t.a, end, 0, K::DEPTH, other);
        next.each = korch_amx::parts_beside(strips);
      }
      for (long s = 0; s < strips; ++s) {
        alignas(64) float sums[SUMS];
        multiply<true>(left, own.right + s * R::PIECES, end - m, R::STEPS, sums, false, next);
        finish_sums<K>(buffers, t, own.packed, sums, m, end, (first + s) * COLUMNS<K>);
      }
      uint16_t* const done = left;
      left = other, other = done;
    }
  }
}

template <class K>
inline void run_split(void* const* buffers, const float* a, const float* b, float* workspace) {
  typedef Room<K> R;
  uint16_t* const shared = reinterpret_cast<uint16_t*>(workspace + K::THREADS * R::OWN);
#pragma omp parallel num_threads(K::THREADS) if (K::THREADS > 1)
  {
    korch_amx::begin();
    if constexpr (R::IS_SHARED) {
#pragma omp for schedule(static)
      for (long r = 0; r < K::BATCH * R::ALL_BLOCKS; ++r)
        korch_amx::split_all<true>(rows_to_split<K>(a + K::a(r / R::ALL_BLOCKS), r % R::ALL_BLOCKS * TOGETHER, 0,
                                                    K::DEPTH, shared + r * R::ALL_PIECES));
    }
#pragma omp for schedule(static)
    for (long task = 0; task < TASKS<K>; ++task) {
      const Task t = task_of<K>(task, a, b);
      const Own<K> own(workspace + omp_get_thread_num() * R::OWN);
      if (t.first == t.last) continue;
      if constexpr (K::GROUP > 0) pass_rows<K>(buffers, t, own);
      else pass_columns<K>(buffers, t, own, shared + t.i * R::ALL_BLOCKS * R::ALL_PIECES);
    }
    korch_amx::end();
  }
}

}  // namespace korch_gemm
