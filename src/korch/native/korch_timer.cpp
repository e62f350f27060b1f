// Times kernels, and calibrates the machine. Loaded by the measuring process.
extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_thread_num(void);
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "korch_tile.h"

#ifndef KORCH_LANES
#if defined(__AVX512F__)
#define KORCH_LANES 16
#elif defined(__AVX__)
#define KORCH_LANES 8
#else
#define KORCH_LANES 4
#endif
#endif
#if defined(__aarch64__)
#define KORCH_REGISTER "+w"
#else
#define KORCH_REGISTER "+v"
#endif

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

}  // namespace

extern "C" {

typedef int (*run_function)(void* state, void* const* buffers);

// Nanoseconds for `repeats` runs; negative if a run fails.
int64_t korch_time(run_function run, void* state, void* const* buffers, int64_t repeats) {
  const int64_t start = now_ns();
  for (int64_t i = 0; i < repeats; ++i) {
    if (run(state, buffers) != 0) return -1;
  }
  return now_ns() - start;
}

int korch_nothing(void*, void* const*) { return 0; }

void korch_threads(int threads) { omp_set_num_threads(threads); }

// Bytes per second of reading `bytes` of memory per thread again and again.
double korch_read_rate(int64_t bytes, int threads, int64_t repeats) {
  const int64_t count = bytes / 4;
  float* memory = static_cast<float*>(aligned_alloc(64, bytes * threads));
  double seconds = 0;
#pragma omp parallel num_threads(threads)
  {
    float* own = memory + count * omp_get_thread_num();
    for (int64_t i = 0; i < count; ++i) own[i] = 1.0f;
    korch::Vec<float, 16> sums[8] = {};
#pragma omp barrier
    const int64_t start = now_ns();
    for (int64_t r = 0; r < repeats; ++r) {
      for (int64_t i = 0; i + 128 <= count; i += 128) {
        for (int u = 0; u < 8; ++u) sums[u] += korch::load<float, 16>(own + i + 16 * u);
      }
      asm volatile("" : : "r"(own) : "memory");
    }
#pragma omp barrier
    const int64_t taken = now_ns() - start;
    for (int u = 1; u < 8; ++u) sums[0] += sums[u];
#pragma omp critical
    if (sums[0][0] > 0) seconds = taken * 1e-9;
  }
  free(memory);
  return seconds > 0 ? static_cast<double>(count) * 4 * threads * repeats / seconds : 0;
}

// Bytes per second of writing `bytes` of memory per thread again and again.
double korch_write_rate(int64_t bytes, int threads, int64_t repeats) {
  const int64_t count = bytes / 4;
  float* memory = static_cast<float*>(aligned_alloc(64, bytes * threads));
  double seconds = 0;
#pragma omp parallel num_threads(threads)
  {
    float* own = memory + count * omp_get_thread_num();
    korch::Vec<float, 16> one = korch::splat<float, 16>(1.0f);
    for (int64_t i = 0; i < count; ++i) own[i] = 0.0f;
#pragma omp barrier
    const int64_t start = now_ns();
    for (int64_t r = 0; r < repeats; ++r) {
      for (int64_t i = 0; i + 128 <= count; i += 128) {
        for (int u = 0; u < 8; ++u) korch::store<float, 16>(own + i + 16 * u, one);
      }
      asm volatile("" : : "r"(own) : "memory");
    }
#pragma omp barrier
    const int64_t taken = now_ns() - start;
#pragma omp critical
    if (own[0] > 0) seconds = taken * 1e-9;
  }
  free(memory);
  return seconds > 0 ? static_cast<double>(count) * 4 * threads * repeats / seconds : 0;
}

// Floating-point operations per second of independent multiply-adds.
double korch_flop_rate(int threads, int64_t repeats) {
  double seconds = 0;
#pragma omp parallel num_threads(threads)
  {
    using V = korch::Vec<float, KORCH_LANES>;
    const V b = korch::splat<float, KORCH_LANES>(0.999f);
    V a0 = b, a1 = b, a2 = b, a3 = b, a4 = b, a5 = b;
    V a6 = b, a7 = b, a8 = b, a9 = b, a10 = b, a11 = b;
#pragma omp barrier
    const int64_t start = now_ns();
    for (int64_t r = 0; r < repeats; ++r) {
      a0 = a0 * b + b;
      a1 = a1 * b + b;
      a2 = a2 * b + b;
      a3 = a3 * b + b;
      a4 = a4 * b + b;
      a5 = a5 * b + b;
      a6 = a6 * b + b;
      a7 = a7 * b + b;
      a8 = a8 * b + b;
      a9 = a9 * b + b;
      a10 = a10 * b + b;
      a11 = a11 * b + b;
      asm volatile("" : KORCH_REGISTER(a0), KORCH_REGISTER(a1), KORCH_REGISTER(a2), KORCH_REGISTER(a3), KORCH_REGISTER(a4), KORCH_REGISTER(a5));
      asm volatile("" : KORCH_REGISTER(a6), KORCH_REGISTER(a7), KORCH_REGISTER(a8), KORCH_REGISTER(a9), KORCH_REGISTER(a10), KORCH_REGISTER(a11));
    }
#pragma omp barrier
    const int64_t taken = now_ns() - start;
    const V sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
#pragma omp critical
    if (sum[0] > 0) seconds = taken * 1e-9;
  }
  return seconds > 0 ? 2.0 * KORCH_LANES * 12 * threads * repeats / seconds : 0;
}

// Nanoseconds of an empty parallel region.
double korch_region_ns(int64_t repeats) {
  const int64_t start = now_ns();
  for (int64_t r = 0; r < repeats; ++r) {
#pragma omp parallel
    asm volatile("" ::: "memory");
  }
  return static_cast<double>(now_ns() - start) / static_cast<double>(repeats);
}

}
