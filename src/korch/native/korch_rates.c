/* Measures the rates of the machine, for the calibration: memory at each level, arithmetic, matrix units. */
#include "korch_runtime.h"

#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20, BLOCK = 128 }; /* BLOCK: a multiple of the floats that an iteration of a loop accesses */
static const int64_t CHUNK_BYTES = 8 << 20;

/* A loop of `korch.measure.rate_loops`: over `count` floats, or of `count` iterations. */
typedef void (*loop)(float *at, int64_t count);

/* What a thread does to measure a rate. */
typedef struct rate {
    void (*chunk)(struct rate *own);
    loop loop;
    int64_t chunks, repeats, chunk_bytes;
    double work;
    float *memory;
    int64_t count, at; /* of its own part */
    bool is_new;
    bool *is_any_done;
    double *sum;
} rate;

/* Add a thread's best rate. A thread that has to wait for its core spoils only some of its own chunks, so that a busy machine
 * does not look slow. Once a thread has finished, late threads would run without competition: they stop if they have
 * measured at least half of their chunks. */
static int add_rate(void *given, korch_member *member) {
    rate own = *(const rate *)given;
    own.memory += own.count * member->me;
    for (int64_t i = 0; own.is_new && i < own.count; ++i) own.memory[i] = 1.0f;
    if (member->threads > 1) member->meet(member);
    int64_t best_ns = INT64_MAX;
    for (int64_t i = 0; i < own.chunks; ++i) {
        const int64_t start_ns = korch_now_ns();
        own.chunk(&own);
        const int64_t taken_ns = korch_now_ns() - start_ns;
        if (2 * i >= own.chunks && __atomic_load_n(own.is_any_done, __ATOMIC_RELAXED)) break;
        if (taken_ns < best_ns) best_ns = taken_ns;
    }
    __atomic_store_n(own.is_any_done, true, __ATOMIC_RELAXED);
    own.sum[member->me] = own.work / (double)(best_ns > 0 ? best_ns : 1);
    return 0;
}

static double summed_rate(int threads, rate *what) {
    double sums[KORCH_MOST_THREADS] = {0}, sum = 0;
    bool is_any_done = false;
    what->is_any_done = &is_any_done;
    what->sum = sums;
    korch_parallel(threads, add_rate, what, NULL);
    for (int i = 0; i < threads && i < KORCH_MOST_THREADS; ++i) sum += sums[i];
    return 1e9 * sum;
}

/* Memory that is kept until `korch_free_memory`: allocating gigabytes takes the system longer than measuring their rate. It
 * comes directly from the system, because a heap might not return freed memory. */
static char *mapping;
static int64_t mapped_bytes, kept_ones; /* kept_ones: the number of floats in it that have been written */

KORCH_API void korch_free_memory(void) {
    if (mapping) munmap(mapping, (size_t)mapped_bytes);
    mapping = NULL;
    mapped_bytes = kept_ones = 0;
}

/* At least `size` bytes, aligned to a huge page; null if memory is exhausted. */
static float *kept_memory(int64_t size) {
    const int64_t needed = size + HUGE_PAGE;
    if (needed > mapped_bytes) {
        korch_free_memory();
        void *const found = mmap(NULL, (size_t)needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return NULL;
        mapping = found;
        mapped_bytes = needed;
        madvise(mapping, (size_t)mapped_bytes, MADV_HUGEPAGE); /* as kernels' memory: small pages are read more slowly */
    }
    return (float *)(((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
}

/* Each chunk continues where the last one ended, so that memory larger than a cache is never read from that cache. */
static void pass_chunk(rate *own) {
    for (int64_t left = own->chunk_bytes / (int64_t)sizeof(float); left > 0;) {
        const int64_t some = left < own->count - own->at ? left : own->count - own->at;
        own->loop(own->memory + own->at, some);
        left -= some;
        own->at = own->at + some < own->count ? own->at + some : 0;
    }
#if defined(__x86_64__)
    __asm__ volatile("sfence" : : : "memory");
#endif
}

/* The summed rate of a pass over `bytes` of memory per thread, in bytes per second: in chunks of `chunk_bytes`, or, if this is
 * 0, of a size that takes much longer than the clock's resolution and less than a time slice. */
KORCH_API double korch_memory_rate(loop pass, int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes) {
    rate own = {.chunk = pass_chunk, .loop = pass, .chunks = chunks, .chunk_bytes = chunk_bytes ? chunk_bytes : CHUNK_BYTES};
    own.work = (double)own.chunk_bytes;
    own.count = bytes / (int64_t)sizeof(float) / BLOCK * BLOCK;
    const int64_t all = own.count * threads, size = all * (int64_t)sizeof(float);
    own.memory = own.count == 0 ? NULL : kept_memory((size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (!own.memory) return 0;
    own.is_new = all > kept_ones;
    const double found = summed_rate(threads, &own);
    if (own.is_new) kept_ones = all;
    return found;
}

static void repeat_chunk(rate *own) { own->loop(NULL, own->repeats); }

/* Operations per second of a loop with `work` operations in each iteration, `repeats` of them in each chunk. */
KORCH_API double korch_work_rate(loop loop, int threads, int64_t chunks, int64_t repeats, double work) {
    rate own = {.chunk = repeat_chunk, .loop = loop, .chunks = chunks, .repeats = repeats, .work = work * (double)repeats};
    return summed_rate(threads, &own);
}
