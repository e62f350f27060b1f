// Tasks of a product on the matrix units, which multiply numbers split into pieces (korch_amx.h).
//
// Either blocks of rows stay in the cache as pieces, while one strip of columns after another is split and
// multiplied by all of them; or a group of strips stays, and the rows go by. A thread's workspace has
// three strips packed (one to compute something once more, two that are split), the pieces of rows and of
// columns, and the sums of a task if its terms are multiplied in chunks. Where several parts have the same
// rows or columns, each splits them: to fetch pieces from another core takes longer. Columns that are constant
// may come as pieces; then the next strip's are only fetched.
//
// A kernel is a struct K with its sizes as constants:
//   BATCH, M, N, DEPTH     of the product; DEPTH is the number of terms
//   W, NV                  lanes of a vector; vectors of columns that are computed together: NV * W is 32
//   ROWS                   rows that the vector units compute together where the matrix units are not available
//   BLOCK                  rows of a block, a multiple of 32 unless it is all of M
//   PARTS                  column parts that are separate tasks
//   A_STEP                 elements between rows of a, whose terms are neighbours
//   B_STEP                 elements between terms of b, if strips are read where they lie: their
//                          columns are neighbours; else 0
//   B_ROW, B_COLUMN        elements between terms and between columns of b, one of them 1, if each
//                          task has to pack what it reads (of a B_STEP the strip at the edge); 0
//                          if b comes packed as [N / (NV * W)][DEPTH][NV * W]
//   SPLIT_B                whether b comes as pieces: [N / 32][DEPTH / 32] steps of a strip
//   CHUNK                  terms that are multiplied at a time
//   GROUP                  strips that stay in the cache while the rows go by; 0 if the rows stay
//   THREADS
//   a(i), b(i)             where the matrices of batch i begin
//   finish<L>(buffers, y, i, m, n)   stores results n to n + L - 1 of row m of batch i
#pragma once

#include "korch_amx.h"
#include "korch_gemm_tile.h"

namespace korch_gemm {

using korch::blocks;

inline constexpr long TOGETHER = 2 * korch_amx::EDGE, SUMS = TOGETHER * TOGETHER;

template <class K>
struct Room {
  static constexpr long STEPS = blocks(K::CHUNK, korch_amx::TERMS), BLOCKS = blocks(K::BLOCK, TOGETHER);
  static constexpr long STRIPS = blocks(K::N, COLUMNS<K> * K::PARTS) + 1;
  static constexpr long PIECES = STEPS * korch_amx::STEP;
  static constexpr bool KEEPS_SUMS = K::CHUNK < K::DEPTH;
  // In floats, each of which has room for two numbers of a piece.
  static constexpr long PACKED = (K::SPLIT_B ? 1 : K::B_COLUMN != 0 ? 3 : 0) * K::DEPTH * COLUMNS<K>;
  static constexpr long LEFT = (K::GROUP ? 2 : BLOCKS) * PIECES / 2;
  static constexpr long RIGHT = K::SPLIT_B ? 0 : (K::GROUP ? K::GROUP : 2) * PIECES / 2;
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
KORCH_INLINE korch_amx::Splitter<true> rows_to_split(const float* a, long m, long k, long terms, uint16_t* to) {
  return korch_amx::splitter<true>(a + m * K::A_STEP + k, K::A_STEP, korch::smaller(TOGETHER, K::M - m), terms, to);
}

// Pieces that are fetched while products are computed.
struct Fetcher {
  const uint16_t* from;
  long left, each;  // lines
};

// What is done beside four products of tiles for those that come next.
template <bool IS_ROWS>
KORCH_INLINE void prepare(korch_amx::Splitter<IS_ROWS>& next) {
  korch_amx::split_some(next, next.each);
}
KORCH_INLINE void prepare(Fetcher& next) {
  for (long i = korch::smaller(next.each, next.left); i > 0; --i, --next.left, next.from += korch_amx::TERMS)
    __builtin_prefetch(next.from, 0, 2);
}

// Sums whose rows are to be finished, while those that come next are computed.
struct Sums {
  const float* from = nullptr;
  long m = 0, end = 0, n = 0;
};

// Store up to `count` rows of sums. What is no number may have been too large for pieces, so such a row
// is computed once more.
template <class K>
__attribute__((noinline)) void finish_rows(void* const* buffers, const Task& t, float* packed, Sums& sums, long count) {
  for (; count > 0 && sums.m < sums.end; --count, ++sums.m, sums.from += TOGETHER) {
    if (!korch_amx::are_finite(sums.from, TOGETHER)) {
      const Strip strip = find_strip<K>(t.b, sums.n, packed);
      tile<K, 1>(buffers, t.a + sums.m * K::A_STEP, strip, t.i, sums.m, sums.n);
    } else if (K::N % COLUMNS<K> != 0 && sums.n + COLUMNS<K> > K::N) {
      finish_edge<K>(buffers, sums.from, 1, t.i, sums.m, sums.n);
    } else {
#pragma GCC unroll 2
      for (int v = 0; v < K::NV; ++v)
        K::template finish<K::W>(buffers, korch::load<float, K::W>(sums.from + v * K::W), t.i, sums.m, sums.n + v * K::W);
    }
  }
}

// Multiply 16 R rows by 32 columns. Meanwhile pieces of what comes next are made, of rows or columns, or
// fetched, and what was multiplied before is finished.
template <class K, int R, class Next>
__attribute__((noinline)) void multiply(void* const* buffers, const Task& t, float* packed, const uint16_t* a,
                                        const uint16_t* b, long steps, float* to, bool adds, Next& next,
                                        Sums& before) {
  const long each = blocks(TOGETHER, korch_amx::TURNS * steps);
  korch_amx::multiply_tiles<R>(korch_amx::Block{a}, b, steps, to, adds, [&]() __attribute__((always_inline)) {
    prepare(next);
    if (before.m < before.end) finish_rows<K>(buffers, t, packed, before, each);
  });
}

template <class K, class Next>
KORCH_INLINE void multiply(void* const* buffers, const Task& t, float* packed, long rows, const uint16_t* a,
                           const uint16_t* b, long steps, float* to, bool adds, Next& next, Sums& before) {
  if (rows > korch_amx::EDGE) multiply<K, 2>(buffers, t, packed, a, b, steps, to, adds, next, before);
  else multiply<K, 1>(buffers, t, packed, a, b, steps, to, adds, next, before);
}

// A task whose rows stay.
template <class K>
inline void pass_columns(void* const* buffers, const Task& t, const Own<K>& own) {
  typedef Room<K> R;
  const long count = blocks(t.end - t.begin, TOGETHER);
  alignas(64) float lone[2][SUMS];
  Sums before;
  for (long k = 0; k < K::DEPTH; k += K::CHUNK) {
    const long terms = korch::smaller(K::CHUNK, K::DEPTH - k), steps = blocks(terms, korch_amx::TERMS);
    for (long r = 0; r < count; ++r)
      korch_amx::split_all(rows_to_split<K>(t.a, t.begin + r * TOGETHER, k, terms, own.left + r * R::PIECES));
    const auto pass = [&](long s, const uint16_t* right, auto next) __attribute__((always_inline)) {
      for (long r = 0; r < count; ++r) {
        const long m = t.begin + r * TOGETHER, end = korch::smaller(m + TOGETHER, t.end);
        float* const sums = R::KEEPS_SUMS ? own.sums + ((s - t.first) * R::BLOCKS + r) * SUMS : lone[(s * count + r) % 2];
        multiply<K>(buffers, t, own.packed, end - m, own.left + r * R::PIECES, right, steps, sums, k > 0, next, before);
        if (k + K::CHUNK >= K::DEPTH) before = {sums, m, end, s * COLUMNS<K>};
      }
    };
    if constexpr (K::SPLIT_B) {
      const auto pieces = [&](long s) { return find_pieces<K>(t.b, s * COLUMNS<K>) + k / korch_amx::TERMS * korch_amx::STEP; };
      constexpr long LINES = korch_amx::STEP / korch_amx::TERMS;  // of a step
      for (long s = t.first; s < t.last; ++s)
        pass(s, pieces(s), Fetcher{pieces(s + 1), s + 1 < t.last ? steps * LINES : 0, blocks(LINES, korch_amx::TURNS * count)});
    } else {
      const auto columns = [&](long s) {
        const Strip strip = find_strip<K>(t.b, s * COLUMNS<K>, own.packed + (1 + s % 2) * (R::PACKED / 3));
        return korch_amx::splitter<false>(strip.from + k * strip.step, strip.step, TOGETHER, terms, own.right + s % 2 * R::PIECES);
      };
      korch_amx::split_all(columns(t.first));
      for (long s = t.first; s < t.last; ++s) {
        korch_amx::Splitter<false> next{};
        if (s + 1 < t.last) {
          next = columns(s + 1);
          next.each = korch_amx::parts_beside(count);
        }
        pass(s, own.right + s % 2 * R::PIECES, next);
      }
    }
  }
  finish_rows<K>(buffers, t, own.packed, before, TOGETHER);
}

// A task whose strips of columns stay, a group at a time.
template <class K>
inline void pass_rows(void* const* buffers, const Task& t, const Own<K>& own) {
  typedef Room<K> R;
  for (long first = t.first; first < t.last; first += K::GROUP) {
    const long strips = korch::smaller(K::GROUP, t.last - first);
    const uint16_t* right = K::SPLIT_B ? find_pieces<K>(t.b, first * COLUMNS<K>) : own.right;
    for (long s = 0; s < strips && !K::SPLIT_B; ++s) {
      const Strip strip = find_strip<K>(t.b, (first + s) * COLUMNS<K>, own.packed);
      korch_amx::split_all(korch_amx::splitter<false>(strip.from, strip.step, TOGETHER, K::DEPTH, own.right + s * R::PIECES));
    }
    korch_amx::split_all(rows_to_split<K>(t.a, t.begin, 0, K::DEPTH, own.left));
    uint16_t *left = own.left, *other = own.left + R::PIECES;
    alignas(64) float sums[2][SUMS];
    Sums before;
    long turn = 0;
    for (long m = t.begin; m < t.end; m += TOGETHER) {
      const long end = korch::smaller(m + TOGETHER, t.end);
      korch_amx::Splitter<true> next{};
      if (end < t.end) {
        next = rows_to_split<K>(t.a, end, 0, K::DEPTH, other);
        next.each = korch_amx::parts_beside(strips);
      }
      for (long s = 0; s < strips; ++s) {
        float* const to = sums[turn++ % 2];
        multiply<K>(buffers, t, own.packed, end - m, left, right + s * R::PIECES, R::STEPS, to, false, next, before);
        before = {to, m, end, (first + s) * COLUMNS<K>};
      }
      uint16_t* const done = left;
      left = other, other = done;
    }
    finish_rows<K>(buffers, t, own.packed, before, TOGETHER);
  }
}

// A task on the vector units.
template <class K>
inline void pass_vectors(void* const* buffers, const Task& t, float* packed) {
  constexpr int TAIL = K::M % K::ROWS;
  for (long s = t.first; s < t.last; ++s) {
    const Strip strip = find_strip<K>(t.b, s * COLUMNS<K>, packed);
    long m = t.begin;
    for (; m + K::ROWS <= t.end; m += K::ROWS) tile<K, K::ROWS>(buffers, t.a + m * K::A_STEP, strip, t.i, m, s * COLUMNS<K>);
    if constexpr (TAIL != 0)
      if (m < t.end) tile<K, TAIL>(buffers, t.a + m * K::A_STEP, strip, t.i, m, s * COLUMNS<K>);
  }
}

template <class K>
inline int run(void* const* buffers, const float* a, const float* b, float* workspace) {
  const bool has_units = korch_amx::is_ready();
#pragma omp parallel num_threads(K::THREADS) if (K::THREADS > 1)
  {
    if (has_units) korch_amx::begin();
#pragma omp for schedule(static)
    for (long task = 0; task < TASKS<K>; ++task) {
      const Task t = task_of<K>(task, a, b);
      const Own<K> own(workspace + omp_get_thread_num() * Room<K>::OWN);
      if (t.first == t.last) continue;
      if (!has_units) pass_vectors<K>(buffers, t, own.packed);
      else if constexpr (K::GROUP > 0) pass_rows<K>(buffers, t, own);
      else pass_columns<K>(buffers, t, own);
    }
    if (has_units) korch_amx::end();
  }
  return 0;
}

}  // namespace korch_gemm
