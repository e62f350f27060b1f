// Attention: softmax(f(q k)) v, a block of rows at a time, whose scores stay in a core's cache.
// Of many keys, a block at a time, too: a row's results so far are scaled down when a later block has
// a larger maximum (online softmax; Milakov and Gimelshein 2018).
//
// A kernel is a struct K with
//   W                 lanes of a vector
//   BATCH, M, N       batches of heads, queries, keys
//   D, E              terms of q k, and columns of v
//   KEYS              keys of a block, a multiple of 2 W unless it is all of them
//   ROWS, CHUNKS      queries of a block, and parts of the queries that are separate tasks
//   NE                vectors of columns of v that are computed together
//   IS_GUARDED        whether weights that are not numbers, which then are a whole row's, become 0
//   Q_STEP            elements between rows of q, whose terms are neighbours
//   K_ROW, K_COLUMN   elements between terms and between columns of k, one of them 1
//   V_ROW, V_COLUMN   the same of v
//   THREADS
//   q(i), k(i), v(i)  where the matrices of batch i begin
//   score<L>(buffers, y, i, m, n)    f of scores n to n + L - 1 of query m
//   finish<L>(buffers, y, i, m, n)   stores results n to n + L - 1 of query m
#pragma once

#include "korch_gemm_tile.h"

namespace korch_attention {

using korch::load;
using korch::splat;
using korch::store;

template <class K>
using V = korch::Vec<float, K::W>;
constexpr int NK = 2;  // vectors of scores that are computed together

// What korch_gemm::pack knows of k and of v.
template <class K>
struct Keys {
  static constexpr long W = K::W, NV = NK, N = K::N, DEPTH = K::D, B_ROW = K::K_ROW, B_COLUMN = K::K_COLUMN;
};
template <class K>
struct Values {
  static constexpr long W = K::W, NV = K::NE, N = K::E, DEPTH = K::N, B_ROW = K::V_ROW, B_COLUMN = K::V_COLUMN;
};

constexpr long up(long n, long step) { return korch::blocks(n, step) * step; }
template <class K>
inline constexpr long WIDTH = up(K::N < K::KEYS ? K::N : K::KEYS, NK * K::W);  // of a row of scores
template <class K>
inline constexpr long COLUMNS = up(K::E, K::NE * K::W);  // of a row of results
template <class K>
inline constexpr bool IS_ONE_BLOCK = K::N <= K::KEYS;
template <class K>
inline constexpr long FLOATS = up(K::N, NK * K::W) * K::D + K::N * COLUMNS<K> + K::ROWS * WIDTH<K> +
                               (IS_ONE_BLOCK<K> ? 0 : K::ROWS * COLUMNS<K>);

// ROWS rows of a times NV vectors of a packed strip.
template <class K, int NV>
KORCH_INLINE void multiply(const float* a, long step, const float* strip, long depth, V<K> (&sum)[K::ROWS][NV]) {
  for (long k = 0; k < depth; ++k) {
    V<K> w[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) w[v] = load<float, K::W>(strip + (k * NV + v) * K::W);
#pragma GCC unroll 32
    for (int r = 0; r < K::ROWS; ++r) {
      V<K> x = splat<float, K::W>(a[r * step + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] += x * w[v];
    }
  }
}

template <class K>
__attribute__((noinline)) void scores(void* const* buffers, const float* q, const float* strip, float* s, float* tops,
                                      long i, long m, long n) {  // s: where the scores of key n belong
  V<K> sum[K::ROWS][NK] = {};
  multiply<K, NK>(q, K::Q_STEP, strip, K::D, sum);
#pragma GCC unroll 32
  for (int r = 0; r < K::ROWS; ++r) {
    V<K> top = load<float, K::W>(tops + r * K::W);
#pragma GCC unroll 4
    for (int v = 0; v < NK; ++v) {
      const long at = n + v * K::W;
      float* const to = s + r * WIDTH<K> + v * K::W;
      V<K> y = splat<float, K::W>(-__builtin_inff());  // beyond the keys, where it weighs nothing
      if (K::N % K::W == 0 || at + K::W <= K::N) {
        if (K::N % (NK * K::W) == 0 || at < K::N) y = K::template score<K::W>(buffers, sum[r][v], i, m + r, at);
      } else {
        for (int j = 0; j < K::W; ++j)
          if (at + j < K::N) y[j] = K::template score<1>(buffers, sum[r][v][j], i, m + r, at + j);
      }
      store<float, K::W>(to, y);
      top = y > top ? y : top;
    }
    store<float, K::W>(tops + r * K::W, top);
  }
}

// What is known of a block of queries, a lane for each, with its lanes in memory before they are
// combined: `parts` has a vector of W for each row.
template <class K>
struct Rows {
  static constexpr long G = korch::blocks(K::ROWS, K::W);
  alignas(64) float parts[G * K::W * K::W];
  alignas(64) float base[G * K::W];    // what is subtracted from the scores: their maximum so far
  alignas(64) float factor[G * K::W];  // by what the results so far are to be multiplied
  V<K> top[G], total[G];

  KORCH_INLINE void set_parts(float x) {
    for (long n = 0; n < G * K::W * K::W; n += K::W) store<float, K::W>(parts + n, splat<float, K::W>(x));
  }

  // A lane for each row, from a vector for each row: a transposed square is combined lane by lane.
  template <typename F>
  KORCH_INLINE V<K> combined(long g, F combine) const {
    V<K> x[K::W];
    korch::load_across<float, K::W, K::W>(x, parts + g * K::W * K::W, K::W);
#pragma GCC unroll 8
    for (int step = K::W / 2; step > 0; step /= 2)
#pragma GCC unroll 16
      for (int j = 0; j < step; ++j) x[j] = combine(x[j], x[j + step]);
    return x[0];
  }
};

// After the scores of a block: what to subtract. A maximum may miss a NaN: its weight is NaN anyway.
template <class K>
KORCH_INLINE void find_bases(Rows<K>& rows) {
  const V<K> infinity = splat<float, K::W>(__builtin_inff()), zero = splat<float, K::W>(0.0f);
  for (long g = 0; g < Rows<K>::G; ++g) {
    V<K> most = rows.combined(g, [](V<K> a, V<K> b) { return a > b ? a : b; });
    if constexpr (!IS_ONE_BLOCK<K>) {
      most = rows.top[g] > most ? rows.top[g] : most;
      // Where all so far is -infinity nothing weighs anything; if that stays so, 0 / 0 is NaN.
      const V<K> base = most == -infinity ? zero : most;
      store<float, K::W>(rows.factor + g * K::W, korch::exp_of_nonpositive<K::W>(rows.top[g] - base));
      rows.top[g] = most;
      most = base;
    }
    store<float, K::W>(rows.base + g * K::W, most);
  }
}

// e^(s - base) of a block, in place; the sums of rows are left in parts.
template <class K>
KORCH_INLINE void exponentials(float* s, long width, Rows<K>& rows) {
  for (long r = 0; r < K::ROWS; ++r, s += WIDTH<K>) {
    const V<K> base = splat<float, K::W>(rows.base[r]);
    V<K> sum = splat<float, K::W>(0.0f), more = sum;
    for (long n = 0; n < width; n += 2 * K::W) {
      const V<K> a = korch::exp_of_nonpositive<K::W>(load<float, K::W>(s + n) - base);
      const V<K> b = korch::exp_of_nonpositive<K::W>(load<float, K::W>(s + n + K::W) - base);
      store<float, K::W>(s + n, a);
      store<float, K::W>(s + n + K::W, b);
      sum += a;
      more += b;
    }
    store<float, K::W>(rows.parts + r * K::W, sum + more);
  }
}

// Add the block's sums to the totals. Weights that are not numbers are all of a row.
template <class K>
KORCH_INLINE void add_totals(float* s, long width, Rows<K>& rows) {
  for (long g = 0; g < Rows<K>::G; ++g) {
    const V<K> own = rows.combined(g, [](V<K> a, V<K> b) { return a + b; });
    if constexpr (IS_ONE_BLOCK<K>) rows.total[g] = own;
    else rows.total[g] = rows.total[g] * load<float, K::W>(rows.factor + g * K::W) + own;
  }
  if constexpr (K::IS_GUARDED) {
    for (long r = 0; r < K::ROWS; ++r) {
      const float total = rows.total[r / K::W][r % K::W];
      if (total == total) continue;
      rows.factor[r] = 0;
      for (long n = 0; n < width; n += K::W) store<float, K::W>(s + r * WIDTH<K> + n, splat<float, K::W>(0.0f));
    }
  }
}

// By what the last results are to be multiplied.
template <class K>
KORCH_INLINE void invert_totals(Rows<K>& rows) {
  const V<K> one = splat<float, K::W>(1.0f), zero = splat<float, K::W>(0.0f);
  for (long g = 0; g < Rows<K>::G; ++g) {
    V<K> total = rows.total[g];
    if constexpr (K::IS_GUARDED) total = total > zero ? total : one;
    store<float, K::W>(rows.base + g * K::W, one / total);
  }
}

// Add what a block of keys gives to the results, of which the last block's are finished.
template <class K>
__attribute__((noinline)) void results(void* const* buffers, const float* s, const float* strip, const float* factors,
                                       const float* inverses, float* so_far, long keys, bool is_first, bool is_last, long i, long m, long n) {
  V<K> sum[K::ROWS][K::NE] = {};
  multiply<K, K::NE>(s, WIDTH<K>, strip, keys, sum);
#pragma GCC unroll 32
  for (int r = 0; r < K::ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < K::NE; ++v) {
      const long at = n + v * K::W;
      V<K> y = sum[r][v];
      if constexpr (!IS_ONE_BLOCK<K>) {
        float* const own = so_far + r * COLUMNS<K> + at;
        if (!is_first) y += load<float, K::W>(own) * splat<float, K::W>(factors[r]);
        if (!is_last) {
          store<float, K::W>(own, y);
          continue;
        }
      }
      y *= splat<float, K::W>(inverses[r]);
      if (K::E % (K::NE * K::W) == 0 || at + K::W <= K::E) {
        K::template finish<K::W>(buffers, y, i, m + r, at);
      } else {
        for (long j = at; j < K::E; ++j) K::template finish<1>(buffers, y[j - at], i, m + r, j);
      }
    }
}

// One block of queries.
template <class K>
KORCH_INLINE void attend(void* const* buffers, const float* q, const float* keys, const float* values, float* s,
                         long i, long m) {
  constexpr long STRIP = K::NE * K::W;
  float* const so_far = s + K::ROWS * WIDTH<K>;
  Rows<K> rows;
  for (long g = 0; g < Rows<K>::G; ++g) {
    rows.top[g] = splat<float, K::W>(-__builtin_inff());
    rows.total[g] = splat<float, K::W>(0.0f);
  }
  for (long from = 0; from < K::N; from += K::KEYS) {
    const long count = korch::smaller(K::KEYS, K::N - from), width = up(count, NK * K::W);
    const bool is_last = from + count == K::N;
    rows.set_parts(-__builtin_inff());
    for (long n = 0; n < count; n += NK * K::W)
      scores<K>(buffers, q, keys + (from + n) * K::D, s + n, rows.parts, i, m, from + n);
    find_bases<K>(rows);
    exponentials<K>(s, width, rows);
    add_totals<K>(s, width, rows);
    if (is_last) invert_totals<K>(rows);
    for (long n = 0; n < K::E; n += STRIP)
      results<K>(buffers, s, values + n * K::N + from * STRIP, rows.factor, rows.base, so_far, count, from == 0,
                 is_last, i, m, n);
  }
}

template <class K>
inline int run(void* const* buffers, const float* q, const float* k, const float* v, float* workspace) {
  constexpr long STRIP = K::NE * K::W;
#pragma omp parallel for num_threads(K::THREADS) schedule(static) if (K::THREADS > 1)
  for (long task = 0; task < K::BATCH * K::CHUNKS; ++task) {
    const long i = task / K::CHUNKS, chunk = task % K::CHUNKS;
    float* const keys = workspace + omp_get_thread_num() * FLOATS<K>;
    float* const values = keys + up(K::N, NK * K::W) * K::D;
    float* const s = values + K::N * COLUMNS<K>;
    for (long n = 0; n < K::N; n += NK * K::W) korch_gemm::pack<Keys<K>>(k + K::k(i), n, keys + n * K::D);
    for (long n = 0; n < K::E; n += STRIP) korch_gemm::pack<Values<K>>(v + K::v(i), n, values + n * K::N);
    const long end = K::M * (chunk + 1) / K::CHUNKS;
    for (long next = K::M * chunk / K::CHUNKS; next < end; next += K::ROWS) {
      const long m = korch::smaller(next, end - K::ROWS);  // the last block may do some rows again
      attend<K>(buffers, q + K::q(i) + m * K::Q_STEP, keys, values, s, i, m);
    }
  }
  return 0;
}

}  // namespace korch_attention
