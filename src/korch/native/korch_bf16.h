// Products of bfloat16 tiles on CPUs without matrix units, by the AVX-512 instruction vdpbf16ps. It adds the products of
// two terms to each lane's sum. It rounds as matrix units do: sums to the nearest float32, values below 2^-126 to zero.
#pragma once

#include "korch_amx.h"

namespace korch_amx {

inline constexpr long ROWS_AT_ONCE = 8;  // with the sums of their 32 columns in registers

// sum + the products of the two terms of each lane. (Assembly, because compilers' builtins for it differ in their types.)
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

// Add the products of a tile's rows by 32 columns for one step of terms; rows are STRIDE bytes apart.
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

// Multiply 16 R rows by 32 columns of B components, and add the products to sums[16 R][32] (if `adds`) or store them
// there. `beside` is called once per pair of components and step, but after all products: its vectors would otherwise
// make the compiler spill the sums.
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
