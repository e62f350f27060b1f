// Times kernels, and calibrates the machine. Loaded by the measuring process.
#include <omp.h>
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

// Floating-point operations per second of independent multiply-adds.
double korch_flop_rate(int threads, int64_t repeats) {
  double seconds = 0;
#pragma omp parallel num_threads(threads)
  {
    korch::Vec<float, KORCH_LANES> a[12], b = korch::splat<float, KORCH_LANES>(0.999f);
    for (int u = 0; u < 12; ++u) a[u] = korch::splat<float, KORCH_LANES>(1.0f + u);
#pragma omp barrier
    const int64_t start = now_ns();
    for (int64_t r = 0; r < repeats; ++r) {
      for (int u = 0; u < 12; ++u) a[u] = a[u] * b + b;
      asm volatile("" : KORCH_REGISTER(a[0]), KORCH_REGISTER(a[1]), KORCH_REGISTER(a[2]), KORCH_REGISTER(a[3]), KORCH_REGISTER(a[4]), KORCH_REGISTER(a[5]));
      asm volatile("" : KORCH_REGISTER(a[6]), KORCH_REGISTER(a[7]), KORCH_REGISTER(a[8]), KORCH_REGISTER(a[9]), KORCH_REGISTER(a[10]), KORCH_REGISTER(a[11]));
    }
#pragma omp barrier
    const int64_t taken = now_ns() - start;
    for (int u = 1; u < 12; ++u) a[0] += a[u];
#pragma omp critical
    if (a[0][0] > 0) seconds = taken * 1e-9;
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
