/* Measures a rate of the machine, for the calibration: that of accesses to memory, or of arithmetic. */
#include "korch_runtime.h"

/* A loop of `korch.measure.rate_loops`: over `count` floats, or of `count` iterations. */
typedef void (*loop)(float *at, int64_t count);

typedef struct {
    loop loop;
    double work; /* of a chunk */
    float *memory;
    int64_t count; /* of each thread: the floats of its part, or any number if there is no memory */
    int64_t chunks, chunk;
    bool is_any_done;
    double rates[KORCH_MOST_THREADS]; /* per nanosecond */
} rate;

/* Set a thread's best rate. A thread that has to wait for its core spoils only some of its own chunks, so that a busy machine
 * does not look slow. Once a thread has finished, late threads would run without competition: they stop if they have
 * measured at least half of their chunks. Each chunk continues where the last one ended, so that memory larger than a cache is
 * never read from that cache. */
static int measure(void *given, korch_member *member) {
    rate *const own = given;
    float *const memory = own->memory ? own->memory + own->count * member->me : NULL;
    int64_t at = 0, best_ns = INT64_MAX;
    if (member->threads > 1) member->meet(member);
    for (int64_t i = 0; i < own->chunks; ++i) {
        const int64_t start_ns = korch_now_ns();
        for (int64_t left = own->chunk; left > 0;) {
            const int64_t some = left < own->count - at ? left : own->count - at;
            own->loop(memory ? memory + at : NULL, some);
            left -= some;
            at = at + some < own->count ? at + some : 0;
        }
#if defined(__x86_64__)
        __asm__ volatile("sfence" : : : "memory");
#endif
        const int64_t taken_ns = korch_now_ns() - start_ns;
        if (2 * i >= own->chunks && __atomic_load_n(&own->is_any_done, __ATOMIC_RELAXED)) break;
        if (taken_ns < best_ns) best_ns = taken_ns;
    }
    __atomic_store_n(&own->is_any_done, true, __ATOMIC_RELAXED);
    own->rates[member->me] = own->work / (double)(best_ns > 0 ? best_ns : 1);
    return 0;
}

/* The sum of the rates of threads, per second: of loops that do `work` in each of `chunks` chunks of `chunk` floats or
 * iterations. If there is memory, each thread passes over `count` floats of its own. */
KORCH_API double korch_rate(loop loop, double work, int threads, float *memory, int64_t count, int64_t chunks, int64_t chunk) {
    rate own = {.loop = loop, .work = work, .memory = memory, .count = count, .chunks = chunks, .chunk = chunk};
    double sum = 0;
    korch_parallel(threads, measure, &own, NULL);
    for (int i = 0; i < KORCH_MOST_THREADS; ++i) sum += own.rates[i];
    return 1e9 * sum;
}
