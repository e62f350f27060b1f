// Matrix products with what reads and writes them fused: y[b][m][n] = finish(sum over k of a * w).
//
// A kernel is a struct K with its sizes as constants:
//   BATCH, M, N, DEPTH     of the product; DEPTH is the number of terms
//   W, NV                  lanes of a vector; vectors of columns that are computed together
//   ROWS                   rows that are computed together in registers
//   BLOCK                  rows of a block, a multiple of ROWS unless it is all of M
//   PARTS                  column parts that are separate tasks
//   A_STEP                 elements between rows of a, whose terms are neighbours
//   PACKS_A                whether a, of one batch, is packed as [M / ROWS][DEPTH][ROWS] first
//   B_STEP                 elements between terms of b, if strips are read where they lie: their
//                          columns are neighbours; else 0
//   B_ROW, B_COLUMN        elements between terms and between columns of b, one of them 1, if each
//                          task has to pack what it reads (of a B_STEP the strip at the edge); 0
//                          if b comes packed as [N / (NV * W)][DEPTH][NV * W]
//   SPLITS                 whether the matrix units multiply, numbers split into pieces (korch_amx.h);
//                          then NV * W is 32, and blocks have multiples of 32 rows, or all of M
//   CHUNK                  terms that they multiply at a time
//   GROUP                  strips that stay in the cache while the rows go by; 0 if the rows stay
//   THREADS
//   a(i), b(i)             where the matrices of batch i begin
//   finish<L>(buffers, y, i, m, n)   stores results n to n + L - 1 of row m of batch i
#pragma once

#include "korch_amx.h"
#include "korch_tile.h"

extern "C" int omp_get_thread_num(void);

namespace korch_gemm {

template <class K>
inline constexpr long COLUMNS = K::NV * K::W;
// Floats that one prefetch brings, as far as they are of a strip's row.
template <class K>
inline constexpr long LINE = COLUMNS<K> < 16 ? COLUMNS<K> : 16;
template <class K>
using V = korch::Vec<float, K::W>;

// Elements between the first terms of rows; with PACKS_A, of blocks of rows, per row.
template <class K>
inline constexpr long A_ROW = K::PACKS_A ? K::DEPTH : K::A_STEP;

// Pack the block of rows from m on, a line of terms of each row at a time.
template <class K>
KORCH_INLINE void pack_rows(const float* a, long m, float* packed) {
  const long count = korch::smaller(K::ROWS, K::M - m);
  for (long k = 0; k < K::DEPTH; k += 16)
    for (long r = 0; r < count; ++r)
      for (long j = k; j < korch::smaller(k + 16, K::DEPTH); ++j)
        packed[j * K::ROWS + r] = a[(m + r) * K::A_STEP + j];
}

// Pack columns [first, first + NV * W) of b as [DEPTH][NV * W]; what is beyond N is zero.
template <class K>
KORCH_INLINE void pack(const float* b, long first, float* strip) {
  if constexpr (K::B_COLUMN == 1) {
    const long count = korch::smaller(COLUMNS<K>, K::N - first);
    for (long k = 0; k < K::DEPTH; ++k) {
      const float* const from = b + k * K::B_ROW + first;
      float* const to = strip + k * COLUMNS<K>;
      if (count == COLUMNS<K>) {
#pragma GCC unroll 4
        for (int v = 0; v < K::NV; ++v) korch::store<float, K::W>(to + v * K::W, korch::load<float, K::W>(from + v * K::W));
        continue;
      }
      for (long j = 0; j < count; ++j) to[j] = from[j];
      for (long j = count; j < COLUMNS<K>; ++j) to[j] = 0.0f;
    }
    return;
  }
  for (int v = 0; v < K::NV; ++v) {
    const long left = K::N - first - v * K::W;
    for (long k = 0; k < K::DEPTH; k += K::W) {
      float* const to = strip + k * COLUMNS<K> + v * K::W;
      const float* const from = b + (first + v * K::W) * K::B_COLUMN + k;
      if (left >= K::W && k + K::W <= K::DEPTH) {
        V<K> x[K::W];
        korch::load_across<float, K::W, K::W>(x, from, K::B_COLUMN);
#pragma GCC unroll 64
        for (int j = 0; j < K::W; ++j) korch::store<float, K::W>(to + j * COLUMNS<K>, x[j]);
        continue;
      }
      for (long i = 0; i < korch::smaller(K::W, K::DEPTH - k); ++i)
        for (long j = 0; j < K::W; ++j) to[i * COLUMNS<K> + j] = j < left ? from[j * K::B_COLUMN + i] : 0;
    }
  }
}

// A strip of b: its first term, and the elements between terms.
struct Strip {
  const float* from;
  long step;
};

// Store the results of a tile at the edge. They come from memory, so that what is done with each is
// compiled once.
template <class K>
KORCH_INLINE void finish_edge(void* const* buffers, const float* sums, long rows, long i, long m, long n) {
  for (long r = 0; r < rows; ++r)
    for (long v = 0; v < K::NV; ++v) {
      const float* const from = sums + r * COLUMNS<K> + v * K::W;
      const long at = n + v * K::W;
      if (at + K::W <= K::N) {
        K::template finish<K::W>(buffers, korch::load<float, K::W>(from), i, m + r, at);
      } else {
        for (long j = at; j < K::N; ++j) K::template finish<1>(buffers, from[j - at], i, m + r, j);
      }
    }
}

// R rows times NV vectors of columns. Meanwhile a line per term of `next` is fetched.
template <class K, int R>
__attribute__((noinline)) void tile(void* const* buffers, const float* a, Strip b, Strip next, long i, long m, long n) {
  V<K> sum[R][K::NV] = {};
  for (long k = 0; k < K::DEPTH; ++k) {
    V<K> w[K::NV];
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) w[v] = korch::load<float, K::W>(b.from + k * b.step + v * K::W);
    __builtin_prefetch(next.from + k * next.step);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      V<K> x = korch::splat<float, K::W>(K::PACKS_A ? a[k * K::ROWS + r] : a[r * K::A_STEP + k]);
#pragma GCC unroll 4
      for (int v = 0; v < K::NV; ++v) sum[r][v] += x * w[v];
    }
  }
  if (K::N % COLUMNS<K> == 0 || n + COLUMNS<K> <= K::N) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < K::NV; ++v) K::template finish<K::W>(buffers, sum[r][v], i, m + r, n + v * K::W);
    return;
  }
  float sums[R * COLUMNS<K>];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < K::NV; ++v) korch::store<float, K::W>(sums + r * COLUMNS<K> + v * K::W, sum[r][v]);
  finish_edge<K>(buffers, sums, R, i, m, n);
}

// Rows [m, end) times the strip of columns n. Meanwhile the strip that follows is fetched, if there is
// one: each block of rows takes a line of each term.
template <class K>
KORCH_INLINE void rows(void* const* buffers, const float* a, Strip strip, Strip next, long i, long m, long end, long n) {
  constexpr int TAIL = K::M % K::ROWS;
  const Strip none{strip.from, 0};
  long line = next.from ? 0 : COLUMNS<K>;
  for (; m + K::ROWS <= end; m += K::ROWS, line += LINE<K>) {
    const Strip share = line < COLUMNS<K> ? Strip{next.from + line, next.step} : none;
    tile<K, K::ROWS>(buffers, a + m * A_ROW<K>, strip, share, i, m, n);
  }
  if constexpr (TAIL != 0)
    if (m < end) tile<K, TAIL>(buffers, a + m * A_ROW<K>, strip, none, i, m, n);
}

// How strips of b lie: the elements between terms, 0 if these are no rows, and between strips.
template <class K>
inline constexpr bool IS_PACKED = K::B_STEP == 0 && K::B_COLUMN == 0;
template <class K>
inline constexpr long STRIP_STEP = IS_PACKED<K> ? COLUMNS<K> : K::B_STEP ? K::B_STEP : K::B_COLUMN == 1 ? K::B_ROW : 0;
template <class K>
inline constexpr long NEXT_STRIP = IS_PACKED<K> ? K::DEPTH * COLUMNS<K> : COLUMNS<K>;

// The strip of columns n, packed first if it does not lie as one.
template <class K>
KORCH_INLINE Strip find_strip(const float* b, long n, float* packed) {
  if constexpr (K::B_COLUMN != 0)
    if (K::B_STEP == 0 || n + COLUMNS<K> > K::N) {
      pack<K>(b, n, packed);
      return {packed, COLUMNS<K>};
    }
  return {b + n / COLUMNS<K> * NEXT_STRIP<K>, STRIP_STEP<K>};
}

// A task's rows [begin, end) of batch i and strips [first, last), and where they are read.
struct Task {
  long i, begin, end, first, last;
  const float *a, *b;
};

template <class K>
KORCH_INLINE Task task_of(long task, const float* a, const float* b) {
  constexpr long BLOCKS = (K::M + K::BLOCK - 1) / K::BLOCK;
  constexpr long STRIPS = (K::N + COLUMNS<K> - 1) / COLUMNS<K>;
  const long block = task % BLOCKS, rest = task / BLOCKS;
  const long i = rest % K::BATCH, part = rest / K::BATCH;
  return {i, block * K::BLOCK, korch::smaller((block + 1) * K::BLOCK, K::M), STRIPS * part / K::PARTS,
          STRIPS * (part + 1) / K::PARTS, a + K::a(i), b + K::b(i)};
}
template <class K>
inline constexpr long TASKS = K::BATCH * ((K::M + K::BLOCK - 1) / K::BLOCK) * K::PARTS;

// With the matrix units either blocks of rows stay in the cache as pieces, while one strip of columns
// after another is split and multiplied by all of them; or a group of strips stays, and the rows go by.
// A thread's workspace has two strips packed, the pieces of rows and of columns, and the sums of a task
// if its terms are multiplied in chunks. Where several parts have the same rows, they share the pieces.
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

template <class K>
inline int run(void* const* buffers, const float* a, const float* b, float* workspace) {
  if constexpr (K::SPLITS)
    if (korch_amx::is_ready()) {
      run_split<K>(buffers, a, b, workspace);
      return 0;
    }
  if constexpr (K::PACKS_A) {
    float* const packed = workspace + K::THREADS * K::DEPTH * COLUMNS<K> * (K::B_COLUMN != 0);
#pragma omp parallel for num_threads(K::THREADS) schedule(static) if (K::THREADS > 1)
    for (long m = 0; m < K::M; m += K::ROWS) pack_rows<K>(a + K::a(0), m, packed + m * K::DEPTH);
    a = packed - K::a(0);
  }
#pragma omp parallel for num_threads(K::THREADS) schedule(static) if (K::THREADS > 1)
  for (long task = 0; task < TASKS<K>; ++task) {
    const Task t = task_of<K>(task, a, b);
    for (long s = t.first; s < t.last; ++s) {
      float* const packed = workspace + omp_get_thread_num() * K::DEPTH * COLUMNS<K>;
      const Strip strip = find_strip<K>(t.b, s * COLUMNS<K>, packed);
      const bool fetches = STRIP_STEP<K> != 0 && s + 1 < t.last;
      const Strip next{fetches ? t.b + (s + 1) * NEXT_STRIP<K> : nullptr, STRIP_STEP<K>};
      rows<K>(buffers, t.a, strip, next, t.i, t.begin, t.end, s * COLUMNS<K>);
    }
  }
  return 0;
}

}  // namespace korch_gemm
