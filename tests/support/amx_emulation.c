// An exact emulation of Intel AMX for tests: eight tile registers of 16 rows of 64 bytes, and their configuration.
//
// Where the processor would fault, the registers are filled with a pattern, so that results are wrong, and the fault is
// counted: a register outside of its configuration, operands that do not fit, or a configuration that is not allowed.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Configuration;
_Static_assert(sizeof(Configuration) == 64, "as the instruction reads it");

static _Thread_local Configuration now;
static _Thread_local uint8_t tiles[8][16][64];
static _Thread_local long faults, loads, configurations;

static void fault() {
  ++faults;
  memset(tiles, 0x5A, sizeof(tiles));
}
static bool is_known(int n) { return now.palette == 1 && n >= 0 && n < 8 && now.rows[n] > 0 && now.row_bytes[n] > 0; }
static bool do_fit(int c, int a, int b) {
  return is_known(c) && is_known(a) && is_known(b) && c != a && c != b && a != b && now.row_bytes[a] % 4 == 0 &&
         now.row_bytes[b] % 4 == 0 && now.row_bytes[c] % 4 == 0 && now.rows[c] == now.rows[a] &&
         now.row_bytes[c] == now.row_bytes[b] && now.row_bytes[a] / 4 == now.rows[b];
}

// An unsigned byte is itself, a signed one is 256 less from 128 on.
static int32_t number(uint8_t byte, bool is_signed) { return is_signed && byte > 127 ? byte - 256 : byte; }
static void dot_bytes(int c, int a, int b, bool signed_a, bool signed_b) {
  if (!do_fit(c, a, b)) {
    fault();
    return;
  }
  for (int m = 0; m < now.rows[c]; ++m)
    for (int n = 0; n < now.row_bytes[c] / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, tiles[c][m] + 4 * n, 4);
      for (int k = 0; k < now.row_bytes[a]; ++k)
        sum += (uint32_t)(number(tiles[a][m][k], signed_a) * number(tiles[b][k / 4][4 * n + k % 4], signed_b));
      memcpy(tiles[c][m] + 4 * n, &sum, 4);
    }
  for (int m = now.rows[c]; m < 16; ++m) memset(tiles[c][m], 0, 64);
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static float bf16_at(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

long emulated_faults(void) { return faults; }
long emulated_loads(void) { return loads; }
long emulated_configurations(void) { return configurations; }
int emulated_is_configured(void) { return now.palette; }

void emulated_ldtilecfg(const void* from) {
  Configuration next;
  memcpy(&next, from, sizeof(next));
  bool is_wrong = next.palette > 1 || next.start != 0;
  for (int n = 0; n < 14; ++n) is_wrong |= next.reserved[n] != 0;
  for (int n = 0; n < 16; ++n) is_wrong |= next.rows[n] > (n < 8 ? 16 : 0) || next.row_bytes[n] > (n < 8 ? 64 : 0);
  if (is_wrong) {
    fault();
    return;
  }
  memset(tiles, 0, sizeof(tiles));
  now = next;
  ++configurations;
}
void emulated_tilerelease(void) {
  memset(tiles, 0, sizeof(tiles));
  memset(&now, 0, sizeof(now));
}
void emulated_tilezero(int8_t n) {
  if (!is_known(n)) {
    fault();
    return;
  }
  memset(tiles[n], 0, sizeof(tiles[n]));
}
void emulated_tileloadd64(int8_t n, const char* from, int64_t step) {
  if (!is_known(n)) {
    fault();
    return;
  }
  memset(tiles[n], 0, sizeof(tiles[n]));
  for (int r = 0; r < now.rows[n]; ++r) memcpy(tiles[n][r], from + r * step, now.row_bytes[n]);
  ++loads;
}
void emulated_tilestored64(int8_t n, char* to, int64_t step) {
  if (!is_known(n)) {
    fault();
    return;
  }
  for (int r = 0; r < now.rows[n]; ++r) memcpy(to + r * step, tiles[n][r], now.row_bytes[n]);
}
void emulated_tdpbssd(int8_t c, int8_t a, int8_t b) { dot_bytes(c, a, b, true, true); }
void emulated_tdpbsud(int8_t c, int8_t a, int8_t b) { dot_bytes(c, a, b, true, false); }
void emulated_tdpbusd(int8_t c, int8_t a, int8_t b) { dot_bytes(c, a, b, false, true); }
void emulated_tdpbuud(int8_t c, int8_t a, int8_t b) { dot_bytes(c, a, b, false, false); }
void emulated_tdpbf16ps(int8_t c, int8_t a, int8_t b) {
  if (!do_fit(c, a, b)) {
    fault();
    return;
  }
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
