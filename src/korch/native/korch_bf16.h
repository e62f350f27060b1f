// Products of tiles of bfloat16 by AVX-512's vdpbf16ps, which adds the products of two terms to each sum of a vector, where
// no matrix units do. It rounds like these: sums to the nearest float32, and what is below 2^-126 counts as zero.
#pragma once

#include "korch_amx.h"

namespace korch_amx {

inline constexpr long ROWS_AT_ONCE = 8;  // their sums of 32 columns are in registers

// sum + the products of the two terms of each lane. Compilers disagree on the types of their builtins for it.
KORCH_INLINE Floats dot_pairs(Floats sum, Bits a, Bits b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

KORCH_INLINE Bits load_pairs(const void* from) {
  Bits x;
  memcpy(&x, from, sizeof(x));
  return x;
}
KORCH_INLINE Bits splat_pair(const char* from) {
  uint32_t x;
  memcpy(&x, from, sizeof(x));
  return korch::splat<uint32_t, EDGE>(x);
}

// Add the products of a tile's rows and 32 columns of a step; rows are STRIDE bytes apart.
template <long STRIDE>
KORCH_INLINE void multiply_step(Floats (&sum)[ROWS_AT_ONCE][2], const char* rows, const uint16_t* columns) {
  for (long pair = 0; pair < EDGE; ++pair, rows += 4, columns += TERMS) {
    const Bits first = load_pairs(columns), second = load_pairs(columns + TILE);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
      const Bits x = splat_pair(rows + r * STRIDE);
      sum[r][0] = dot_pairs(sum[r][0], x, first);
      sum[r][1] = dot_pairs(sum[r][1], x, second);
    }
  }
}

// Add the products of 16 R rows and 32 columns, of B components, to sums[16 R][32], or set them. `beside` is called as
// often as there are pairs of components in all steps, but not among them: its vectors would drive the sums out of registers.
template <int R, int B = MOST_COMPONENTS, class Rows, class Beside>
KORCH_INLINE void multiply_tiles(const Rows rows, const uint16_t* b, long steps, float* sums, bool adds, Beside beside) {
  constexpr Pairs ALL = PAIRS<Rows::COMPONENTS, B>;
  for (long first = 0; first < R * EDGE; first += ROWS_AT_ONCE) {
    float* const to = sums + first * TOGETHER;
    Floats sum[ROWS_AT_ONCE][2] = {};
    if (adds) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS_AT_ONCE; ++r)
        for (int t = 0; t < 2; ++t) sum[r][t] = korch::load<float, EDGE>(to + r * TOGETHER + t * EDGE);
    }
    for (long step = 0; step < steps; ++step)
#pragma GCC unroll 9
      for (int t = 0; t < ALL.count; ++t) {
        const uint16_t* const tile = rows.tile(step, ALL.rows[t], first / EDGE);
        multiply_step<Rows::STRIDE>(sum, reinterpret_cast<const char*>(tile) + first % EDGE * Rows::STRIDE,
                                    b + step * STEP_OF<B> + ALL.columns[t] * 2 * TILE);
      }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_AT_ONCE; ++r)
      for (int t = 0; t < 2; ++t) korch::store<float, EDGE>(to + r * TOGETHER + t * EDGE, sum[r][t]);
  }
  for (long turn = 0; turn < steps * ALL.count; ++turn) beside();
}

}  // namespace korch_amx
