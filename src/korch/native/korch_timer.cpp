// Measures the times of kernels and the rates of the machine. Loaded by the measuring process.
extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_thread_num(void);
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "korch_units.h"

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

typedef float Register __attribute__((vector_size(4 * KORCH_LANES)));

inline Register load(const float* at) {
  Register x;
  memcpy(&x, at, sizeof(x));
  return x;
}
inline void store(float* at, Register x) { memcpy(at, &x, sizeof(x)); }
inline Register splat(float x) { return Register{} + x; }

constexpr int64_t BLOCK = 8 * KORCH_LANES;        // elements that one iteration of a loop accesses
constexpr int64_t CHUNK_BYTES = 8 << 20;          // much longer than the clock resolution, shorter than a time slice
constexpr int64_t HUGE_PAGE = 2 << 20;

// The sum of all threads' best rates, where prepare(thread) returns the function that does one chunk of
// `work`. A thread that has to wait for its core spoils only some of its own chunks, so that a busy machine
// does not look slow. Once a thread has finished, late threads would run without competition: they stop
// if they have measured at least half of their chunks.
template <typename Prepare>
double summed_rate(int threads, int64_t chunks, double work, Prepare prepare) {
  double sum = 0;
  bool is_any_done = false;
#pragma omp parallel num_threads(threads)
  {
    auto chunk = prepare(omp_get_thread_num());
    int64_t best_ns = INT64_MAX;
#pragma omp barrier
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t start = now_ns();
      chunk();
      const int64_t taken_ns = now_ns() - start;
      if (2 * i >= chunks && __atomic_load_n(&is_any_done, __ATOMIC_RELAXED)) break;
      if (taken_ns < best_ns) best_ns = taken_ns;
    }
    __atomic_store_n(&is_any_done, true, __ATOMIC_RELAXED);
#pragma omp critical
    sum += work / (best_ns > 0 ? best_ns : 1);
  }
  return 1e9 * sum;
}

// Memory that is kept until `korch_free_memory`: allocating gigabytes takes the system longer than measuring
// their rate. It comes directly from the system, because a heap might not return freed memory.
char* mapping = nullptr;
int64_t mapped_bytes = 0;
int64_t kept_ones = 0;  // the number of floats in it that have been written

void unmap_memory() {
  if (mapping != nullptr) munmap(mapping, mapped_bytes);
  mapping = nullptr;
  mapped_bytes = kept_ones = 0;
}

// At least `size` bytes, aligned to a huge page; null if memory is exhausted.
float* kept_memory(int64_t size) {
  const int64_t needed = size + HUGE_PAGE;
  if (needed > mapped_bytes) {
    unmap_memory();
    void* found = mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    mapping = static_cast<char*>(found);
    mapped_bytes = needed;
#if defined(MADV_HUGEPAGE)
    // Kernels' memory also has huge pages: small pages are read more slowly.
    madvise(mapping, mapped_bytes, MADV_HUGEPAGE);
#endif
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping) + HUGE_PAGE - 1;
  return reinterpret_cast<float*>(start / HUGE_PAGE * HUGE_PAGE);
}

// The summed rate of passes over `bytes` of memory per thread, in bytes per second. Each chunk continues
// where the last one ended, so that memory larger than a cache is never read from that cache.
template <typename Pass>
double memory_rate(int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes, Pass pass) {
  const int64_t count = bytes / sizeof(float) / BLOCK * BLOCK;
  const int64_t whole = (count * threads * int64_t(sizeof(float)) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  float* memory = count == 0 ? nullptr : kept_memory(whole);
  if (memory == nullptr) return 0;
  const bool is_new = count * threads > kept_ones;
  const double rate = summed_rate(threads, chunks, double(chunk_bytes), [=](int thread) {
    float* own = memory + count * thread;
    for (int64_t i = 0; is_new && i < count; ++i) own[i] = 1.0f;
    return [=, at = int64_t(0)]() mutable {
      for (int64_t left = chunk_bytes / int64_t(sizeof(float)); left > 0;) {
        const int64_t some = left < count - at ? left : count - at;
        pass(own + at, some);
        left -= some;
        at = at + some < count ? at + some : 0;
      }
    };
  });
  if (is_new) kept_ones = count * threads;
  return rate;
}

#if defined(__x86_64__)
// Whether the CPU has clflushopt, which flushes cache lines concurrently: flushing one by one takes 30 times as long.
bool flushes_at_once() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 23);
}
#endif

// A file of the system that is read repeatedly; each read returns its current contents.
class Report {
 public:
  explicit Report(const char* path) : file_(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~Report() {
    if (file_ >= 0) close(file_);
  }
  // Read its first `size - 1` characters; return false if there is no such file.
  bool read(char* text, size_t size) const {
    const ssize_t count = file_ < 0 ? -1 : pread(file_, text, size - 1, 0);
    text[count < 0 ? 0 : count] = 0;
    return count > 0;
  }

 private:
  int file_;
};

// Nanoseconds since the thread's start for which it was runnable but had no core; -1 if unknown.
int64_t waited_ns() {
  static thread_local const Report report("/proc/thread-self/schedstat");
  char text[96];
  long long running = 0, waiting = -1;
  return report.read(text, sizeof text) && sscanf(text, "%lld %lld", &running, &waiting) == 2 ? waiting : -1;
}

// Nanoseconds for which other virtual machines used this machine's cores (steal time); 0 if unknown.
int64_t stolen_ns() {
  static const Report report("/proc/stat");
  static const int64_t tick_ns = 1000000000LL / sysconf(_SC_CLK_TCK);
  char text[256];
  long long ticks[8] = {};
  if (!report.read(text, sizeof text)) return 0;
  sscanf(text, "cpu %lld %lld %lld %lld %lld %lld %lld %lld", ticks, ticks + 1, ticks + 2, ticks + 3, ticks + 4,
         ticks + 5, ticks + 6, ticks + 7);
  return ticks[7] * tick_ns;
}

int64_t involuntary_switches() {
  rusage used;
  return getrusage(RUSAGE_SELF, &used) == 0 ? used.ru_nivcsw : 0;
}

// Measures the longest time that a thread waited for a core between `begin` and `end`.
class Absence {
 public:
  // Try a few times to return at a moment when every thread has a core.
  void begin(int threads) {
    int64_t most_ns = 1;
    for (int turn = 0; turn < TRIES && most_ns > 0; ++turn) {
      stolen_ns_ = stolen_ns();
      switches_ = involuntary_switches();
      most_ns = 0;
#pragma omp parallel num_threads(threads) reduction(max : most_ns)
      {
        const int64_t first_ns = waited_ns();
#pragma omp barrier
        most_ns = (before_ns() = waited_ns()) - first_ns;
      }
    }
  }
  // Return the longest wait during a run of `taken_ns` that has just ended. Waits after the run, which make a thread
  // late here, are subtracted. If the system only counts context switches, a switch counts as a wait of the whole run.
  int64_t end(int threads, int64_t taken_ns) const {
    const int64_t ended_ns = now_ns();
    int64_t most_ns = -1;
#pragma omp parallel num_threads(threads) reduction(max : most_ns)
    {
      const int64_t all_ns = waited_ns(), late_ns = now_ns() - ended_ns;
      if (all_ns >= 0) most_ns = all_ns > before_ns() + late_ns ? all_ns - before_ns() - late_ns : 0;
    }
    if (most_ns < 0) most_ns = involuntary_switches() > switches_ ? taken_ns : 0;
    const int64_t away_ns = most_ns + stolen_ns() - stolen_ns_;
    return away_ns < taken_ns ? away_ns : taken_ns;
  }

 private:
  static int64_t& before_ns() {
    static thread_local int64_t value = 0;
    return value;
  }
  static constexpr int TRIES = 10;
  int64_t stolen_ns_ = 0, switches_ = 0;
};

// Flush cache lines from all caches.
void evict(char* from, int64_t lines) {
#if defined(__x86_64__)
  static const bool at_once = flushes_at_once();
  for (int64_t i = 0; i < lines; ++i) {
    if (at_once) asm volatile("clflushopt %0" : "+m"(from[64 * i]));
    else asm volatile("clflush %0" : "+m"(from[64 * i]));
  }
  asm volatile("mfence" : : : "memory");
#elif defined(__aarch64__)
  for (int64_t i = 0; i < lines; ++i) asm volatile("dc civac, %0" : : "r"(from + 64 * i) : "memory");
#endif
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

struct korch_span {
  char* at;
  int64_t size;
};

// Nanoseconds of one run with caches in the state that they have in a plan; negative if the run fails. First, the
// buffers in `cold` are flushed from all caches. Then each thread reads enough of its part of `other`, which is larger
// than the cores' private caches, to evict weights and outputs from the private caches. Then the threads write the
// inputs, each its part, and read as many other bytes, as the preceding kernels of a plan would. `away_ns` receives the
// longest time that a thread had no core during the run.
int64_t korch_time_fresh(run_function run, void* state, void* const* buffers, const korch_span* inputs,
                         int64_t count, const korch_span* cold, int64_t cold_count,
                         const korch_span* other, int64_t own_cache_bytes, int threads, int64_t* away_ns) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num();
    for (int64_t k = 0; k < cold_count; ++k) {
      const int64_t lines = (cold[k].size + 63) / 64;
      const int64_t first = lines * me / threads;
      evict(cold[k].at + 64 * first, lines * (me + 1) / threads - first);
    }
    static thread_local int64_t at = 0;
    const int64_t part_lines = other->size / 64 / threads;
    const char* part = other->at + 64 * part_lines * me;
    char sum = 0;
    const auto read_another = [&] {
      at = at + 1 < part_lines ? at + 1 : 0;
      sum += part[64 * at];
    };
    for (int64_t i = 0; i < own_cache_bytes / 64; ++i) read_another();
#pragma omp barrier
    for (int64_t k = 0; k < count; ++k) {
      const int64_t lines = (inputs[k].size + 63) / 64;
      for (int64_t i = lines * me / threads; i < lines * (me + 1) / threads; ++i) {
        read_another();
        volatile char* line = inputs[k].at + 64 * i;
        *line = *line;
      }
    }
    asm volatile("" : : "r"(sum) : "memory");
  }
  Absence absence;
  absence.begin(threads);
  const int64_t taken_ns = korch_time(run, state, buffers, 1);
  *away_ns = taken_ns < 0 ? 0 : absence.end(threads, taken_ns);
  return taken_ns;
}

int korch_nothing(void*, void* const*) { return 0; }

// Free the memory on which memory rates were measured.
void korch_free_memory() { unmap_memory(); }

/* Set the number of OpenMP threads; return the previous number. */
int korch_threads(int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    return before;
}

// The rates of reading, of writing, and of writing past the caches, in bytes per second: on `bytes` of memory per
// thread, in `chunks` chunks of `chunk_bytes`, or of 8 MiB.
double korch_pass_rate(int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes) {
  return memory_rate(bytes, threads, chunks, chunk_bytes, [](const float* at, int64_t count) {
    Register sums[8] = {};
    for (int64_t i = 0; i < count; i += BLOCK) {
      for (int u = 0; u < 8; ++u) sums[u] += load(at + i + KORCH_LANES * u);
    }
    for (int u = 1; u < 8; ++u) sums[0] += sums[u];
    asm volatile("" : KORCH_REGISTER(sums[0]) : : "memory");
  });
}

double korch_read_rate(int64_t bytes, int threads, int64_t chunks) {
  return korch_pass_rate(bytes, threads, chunks, CHUNK_BYTES);
}

double korch_write_rate(int64_t bytes, int threads, int64_t chunks) {
  return memory_rate(bytes, threads, chunks, CHUNK_BYTES, [](float* at, int64_t count) {
    const Register one = splat(1.0f);
    for (int64_t i = 0; i < count; i += BLOCK) {
      for (int u = 0; u < 8; ++u) store(at + i + KORCH_LANES * u, one);
    }
    asm volatile("" : : "r"(at) : "memory");
  });
}

double korch_stream_rate(int64_t bytes, int threads, int64_t chunks) {
#if defined(__AVX__)
  return memory_rate(bytes, threads, chunks, CHUNK_BYTES, [](float* at, int64_t count) {
    const Register one = splat(1.0f);
    for (int64_t i = 0; i < count; i += KORCH_LANES) {
      asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<Register*>(at + i)) : "v"(one));
    }
    asm volatile("sfence" : : : "memory");
  });
#else
  return korch_write_rate(bytes, threads, chunks);
#endif
}

// Floating-point operations per second of independent multiply-adds, `repeats` in each chunk.
double korch_flop_rate(int threads, int64_t chunks, int64_t repeats) {
  using V = Register;
  const double work = 2.0 * KORCH_LANES * 12 * repeats;
  return summed_rate(threads, chunks, work, [=](int) {
    return [=]() {
      const V b = splat(0.999f);
      V a0 = b, a1 = b, a2 = b, a3 = b, a4 = b, a5 = b;
      V a6 = b, a7 = b, a8 = b, a9 = b, a10 = b, a11 = b;
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
    };
  });
}

// Operations per second of float32 products computed by bfloat16 components: one such product takes six of components.
#if defined(__AVX512BF16__)
double korch_split_rate(int threads, int64_t chunks, int64_t repeats) {
  constexpr int SUMS = 12;
  const double work = 2.0 * SUMS * 32 / 6 * repeats;
  return summed_rate(threads, chunks, work, [=](int) {
    return [=]() {
      Register sum[SUMS] = {};
      for (int64_t r = 0; r < repeats; ++r)
#pragma GCC unroll 12
        for (Register& each : sum) {
          asm volatile("vdpbf16ps %1, %1, %0" : "+v"(each) : "v"(Register{}));
        }
    };
  });
}
#elif defined(__x86_64__)
double korch_split_rate(int threads, int64_t chunks, int64_t repeats) {
  if (!korch::may_use_matrix_units()) return 0;
  const double work = 2.0 * 4 * 16 * 16 * 32 / 6 * repeats;
  return summed_rate(threads, chunks, work, [=](int) {
    return [=]() {
      alignas(64) uint8_t tiles[64] = {1};  // the palette; then the bytes of a row and the rows of each register
      for (int n = 0; n < 8; ++n) tiles[16 + 2 * n] = 64, tiles[48 + n] = 16;
      asm volatile("ldtilecfg %0\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7" : : "m"(tiles));
      for (int64_t r = 0; r < repeats; ++r)
        asm volatile(
            "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
            "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :);
      asm volatile("tilerelease" : :);
    };
  });
}
#else
double korch_split_rate(int, int64_t, int64_t) { return 0; }
#endif

// The least time of an empty parallel region in nanoseconds, of those that begin within limit_ns: on a busy machine, a
// region may wait for its threads for a whole time slice.
int64_t korch_region_ns(int64_t limit_ns) {
  int64_t best_ns = INT64_MAX;
  const int64_t begin = now_ns();
  for (int64_t start = begin; start - begin < limit_ns;) {
#pragma omp parallel
    asm volatile("" ::: "memory");
    const int64_t end = now_ns();
    if (end - start < best_ns) best_ns = end - start;
    start = end;
  }
  return best_ns;
}

}  // extern "C"
