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
//   SPLIT_B              whether b comes as pieces: [N / 32][DEPTH / 32] steps of a strip
//   CHUNK                  terms that they multiply at a time
//   GROUP                  strips that stay in the cache while the rows go by; 0 if the rows stay
//   FETCHES                whether the lines that a tile's results are stored to are fetched before
//   THREADS
//   a(i), b(i)             where the matrices of batch i begin
//   finish<L>(buffers, y, i, m, n)   stores results n to n + L - 1 of row m of batch i
//   place(buffers, i, m, n)          where it stores the first of them, in the first output
#pragma once

#include "korch_gemm_split.h"
#include "korch_gemm_tile.h"

namespace korch_gemm {

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
      const Strip following{fetches ? t.b + (s + 1) * NEXT_STRIP<K> : nullptr, STRIP_STEP<K>};
      const Strip next = IS_STREAM<K> ? Strip{strip.from + AHEAD, strip.step} : following;
      rows<K>(buffers, t.a, strip, next, t.i, t.begin, t.end, s * COLUMNS<K>);
    }
  }
  return 0;
}

}  // namespace korch_gemm
