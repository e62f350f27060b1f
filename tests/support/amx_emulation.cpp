// An exact emulation of Intel AMX for tests: eight tile registers of 16 rows of 64 bytes, and their configuration.
//
// Where the processor would fault, the registers are filled with a pattern, so that results are wrong, and the fault is
// counted: a register outside of its configuration, operands that do not fit, or a configuration that is not allowed.

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct Configuration {
  uint8_t palette = 0, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64);

thread_local Configuration now;
thread_local uint8_t tiles[8][16][64];
thread_local long faults = 0, loads = 0, configurations = 0;

void fault() {
  ++faults;
  memset(tiles, 0x5A, sizeof(tiles));
}
bool is_known(int n) { return now.palette == 1 && n >= 0 && n < 8 && now.rows[n] > 0 && now.row_bytes[n] > 0; }
bool do_fit(int c, int a, int b) {
  return is_known(c) && is_known(a) && is_known(b) && c != a && c != b && a != b && now.row_bytes[a] % 4 == 0 &&
         now.row_bytes[b] % 4 == 0 && now.row_bytes[c] % 4 == 0 && now.rows[c] == now.rows[a] &&
         now.row_bytes[c] == now.row_bytes[b] && now.row_bytes[a] / 4 == now.rows[b];
}

template <class A, class B>
void dot_bytes(int c, int a, int b) {
  if (!do_fit(c, a, b)) return fault();
  for (int m = 0; m < now.rows[c]; ++m)
    for (int n = 0; n < now.row_bytes[c] / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, tiles[c][m] + 4 * n, 4);
      for (int k = 0; k < now.row_bytes[a]; ++k) {
        const int32_t x = static_cast<A>(tiles[a][m][k]), y = static_cast<B>(tiles[b][k / 4][4 * n + k % 4]);
        sum += static_cast<uint32_t>(x * y);
      }
      memcpy(tiles[c][m] + 4 * n, &sum, 4);
    }
  for (int m = now.rows[c]; m < 16; ++m) memset(tiles[c][m], 0, 64);
}

float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
float bf16_at(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

}  // namespace

extern "C" {

long emulated_faults() { return faults; }
long emulated_loads() { return loads; }
long emulated_configurations() { return configurations; }
int emulated_is_configured() { return now.palette; }

void emulated_ldtilecfg(const void* from) {
  Configuration next;
  memcpy(&next, from, sizeof(next));
  bool is_wrong = next.palette > 1 || next.start != 0;
  for (uint8_t x : next.reserved) is_wrong |= x != 0;
  for (int n = 0; n < 16; ++n) is_wrong |= next.rows[n] > (n < 8 ? 16 : 0) || next.row_bytes[n] > (n < 8 ? 64 : 0);
  if (is_wrong) return fault();
  memset(tiles, 0, sizeof(tiles));
  now = next;
  ++configurations;
}
void emulated_tilerelease() {
  memset(tiles, 0, sizeof(tiles));
  now = Configuration();
}
void emulated_tilezero(int8_t n) {
  if (!is_known(n)) return fault();
  memset(tiles[n], 0, sizeof(tiles[n]));
}
void emulated_tileloadd64(int8_t n, const char* from, int64_t step) {
  if (!is_known(n)) return fault();
  memset(tiles[n], 0, sizeof(tiles[n]));
  for (int r = 0; r < now.rows[n]; ++r) memcpy(tiles[n][r], from + r * step, now.row_bytes[n]);
  ++loads;
}
void emulated_tilestored64(int8_t n, char* to, int64_t step) {
  if (!is_known(n)) return fault();
  for (int r = 0; r < now.rows[n]; ++r) memcpy(to + r * step, tiles[n][r], now.row_bytes[n]);
}
void emulated_tdpbssd(int8_t c, int8_t a, int8_t b) { dot_bytes<int8_t, int8_t>(c, a, b); }
void emulated_tdpbsud(int8_t c, int8_t a, int8_t b) { dot_bytes<int8_t, uint8_t>(c, a, b); }
void emulated_tdpbusd(int8_t c, int8_t a, int8_t b) { dot_bytes<uint8_t, int8_t>(c, a, b); }
void emulated_tdpbuud(int8_t c, int8_t a, int8_t b) { dot_bytes<uint8_t, uint8_t>(c, a, b); }
void emulated_tdpbf16ps(int8_t c, int8_t a, int8_t b) {
  if (!do_fit(c, a, b)) return fault();
  for (int m = 0; m < now.rows[c]; ++m)
    for (int n = 0; n < now.row_bytes[c] / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < now.row_bytes[a] / 4; ++k) {
        even = flushed(fmaf(bf16_at(tiles[a][m] + 4 * k), bf16_at(tiles[b][k] + 4 * n), even));
        odd = flushed(fmaf(bf16_at(tiles[a][m] + 4 * k + 2), bf16_at(tiles[b][k] + 4 * n + 2), odd));
      }
      memcpy(&sum, tiles[c][m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      memcpy(tiles[c][m] + 4 * n, &sum, 4);
    }
  for (int m = now.rows[c]; m < 16; ++m) memset(tiles[c][m], 0, 64);
}
}
