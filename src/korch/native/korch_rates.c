/* Measures the rates of the machine, for the calibration: memory at each level, arithmetic, matrix units. */
#include "korch_runtime.h"

#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { HUGE_PAGE = 2 << 20, BLOCK = 128 };  /* BLOCK: the floats that one iteration of a loop accesses */
static const int64_t CHUNK_BYTES = 8 << 20;

/* -- Loops for each size of vectors --------------------------------------------------------------------------------- */

typedef struct {
    int lanes;
    void (*passes[3])(float *at, int64_t count); /* that read, write, and write past the caches */
    void (*multiply)(int64_t repeats);
} loops;

#if defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+v"
#endif
#define KEEP(x) __asm__ volatile("" : IN_REGISTER(x))
#define TIMES(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)

/* Each thread's loads, stores, stores past the caches, and twelve independent chains of multiply-adds. */
#define LOOPS(LANES, TARGET, STREAM) \
    typedef float vector##LANES __attribute__((vector_size(4 * LANES), may_alias)); \
    TARGET static void read##LANES(float *at, int64_t count) { \
        vector##LANES sums[8] = {{0}}; \
        for (int64_t i = 0; i < count; i += 8 * LANES) \
            for (int u = 0; u < 8; ++u) sums[u] += *(vector##LANES *)(at + i + LANES * u); \
        for (int u = 1; u < 8; ++u) sums[0] += sums[u]; \
        KEEP(sums[0]); \
    } \
    TARGET static void write##LANES(float *at, int64_t count) { \
        const vector##LANES one = (vector##LANES){0} + 1.0f; \
        for (int64_t i = 0; i < count; i += 8 * LANES) \
            for (int u = 0; u < 8; ++u) *(vector##LANES *)(at + i + LANES * u) = one; \
        __asm__ volatile("" : : "r"(at) : "memory"); \
    } \
    TARGET static void stream##LANES(float *at, int64_t count) { \
        const vector##LANES one = (vector##LANES){0} + 1.0f; \
        for (int64_t i = 0; i < count; i += LANES) STREAM(*(vector##LANES *)(at + i), one); \
        __asm__ volatile("" : : "r"(at) : "memory"); \
    } \
    TARGET static void multiply##LANES(int64_t repeats) { \
        vector##LANES b = (vector##LANES){0} + 0.999f; \
        TIMES(BEGIN) \
        for (int64_t r = 0; r < repeats; ++r) { \
            TIMES(STEP) \
            TIMES(HOLD) \
        } \
    } \
    static const loops loops##LANES = {LANES, {read##LANES, write##LANES, stream##LANES}, multiply##LANES};
#define BEGIN(i) __typeof__(b) a##i = b;
#define STEP(i) a##i = a##i * b + b;
#define HOLD(i) KEEP(a##i);
#define STORE(to, from) to = from

#if defined(__clang__) && __clang_major__ < 22
#define WIDE ",evex512" /* these have vectors of 512 bits only with another feature */
#else
#define WIDE ""
#endif
#if defined(__x86_64__)
#define STREAM_VECTOR(to, from) __asm__ volatile("vmovntps %1, %0" : "=m"(to) : "v"(from))
LOOPS(4, , STORE)
LOOPS(8, __attribute__((target("avx2,fma"))), STREAM_VECTOR)
LOOPS(16, __attribute__((target("avx512f,fma" WIDE))), STREAM_VECTOR)
static const loops *chosen = &loops4;
#else
LOOPS(4, , STORE)
static const loops *chosen = &loops4;
#endif

static bool has_tiles;

/* Use vectors of this many floats, and matrix units or not. */
KORCH_API void korch_use_units(int lanes, int tiles) {
#if defined(__x86_64__)
    chosen = lanes == 16 ? &loops16 : lanes == 8 ? &loops8 : &loops4;
    has_tiles = tiles && korch_matrix_units();
#else
    (void)lanes, (void)tiles;
#endif
}

/* -- Rates ---------------------------------------------------------------------------------------------------------- */

/* What a thread does to measure a rate. */
typedef struct rate {
    void (*chunk)(struct rate *own);
    int64_t chunks, repeats, chunk_bytes;
    double work;
    void (*pass)(float *at, int64_t count); /* over memory; null for arithmetic */
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
#ifdef MADV_HUGEPAGE
        madvise(mapping, (size_t)mapped_bytes, MADV_HUGEPAGE); /* as kernels' memory: small pages are read more slowly */
#endif
    }
    return (float *)(((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
}

/* Each chunk continues where the last one ended, so that memory larger than a cache is never read from that cache. */
static void pass_chunk(rate *own) {
    for (int64_t left = own->chunk_bytes / (int64_t)sizeof(float); left > 0;) {
        const int64_t some = left < own->count - own->at ? left : own->count - own->at;
        own->pass(own->memory + own->at, some);
        left -= some;
        own->at = own->at + some < own->count ? own->at + some : 0;
    }
#if defined(__x86_64__)
    __asm__ volatile("sfence" : : : "memory");
#endif
}

/* The summed rate of passes over `bytes` of memory per thread that read (0), write (1), or write past the caches (2), in bytes
 * per second: in chunks of `chunk_bytes`, or, if this is 0, of a size that takes much longer than the clock's resolution and
 * less than a time slice. */
KORCH_API double korch_memory_rate(int kind, int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes) {
    rate own = {.chunk = pass_chunk, .chunks = chunks, .chunk_bytes = chunk_bytes ? chunk_bytes : CHUNK_BYTES};
    own.pass = chosen->passes[kind];
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

static void multiply_chunk(rate *own) { chosen->multiply(own->repeats); }

/* Floating-point operations per second of independent multiply-adds, `repeats` in each chunk. */
KORCH_API double korch_flop_rate(int threads, int64_t chunks, int64_t repeats) {
    rate own = {.chunk = multiply_chunk, .chunks = chunks, .repeats = repeats};
    own.work = 2.0 * chosen->lanes * 12 * (double)repeats;
    return summed_rate(threads, &own);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bf16" WIDE))) static void multiply_bf16(rate *own) {
    typedef float sums __attribute__((vector_size(64)));
    const sums b = {0};
#define ZERO(i) sums s##i = b;
#define DOT(i) __asm__ volatile("vdpbf16ps %1, %1, %0" : "+v"(s##i) : "v"(b));
    TIMES(ZERO)
    for (int64_t r = 0; r < own->repeats; ++r) { TIMES(DOT) }
}

__attribute__((target("amx-tile,amx-bf16"))) static void multiply_tiles(rate *own) {
    static const _Alignas(64) struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } all = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("ldtilecfg %0\n tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7" : : "m"(all));
    for (int64_t r = 0; r < own->repeats; ++r)
        __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
                         "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3");
    __asm__ volatile("tilerelease");
}
#endif

/* Operations per second of float32 products computed by bfloat16 components: one such product takes six of components. */
KORCH_API double korch_split_rate(int threads, int64_t chunks, int64_t repeats) {
    rate own = {.chunks = chunks, .repeats = repeats};
#if defined(__x86_64__)
    own.chunk = has_tiles ? multiply_tiles : multiply_bf16;
    own.work = 2.0 * (has_tiles ? 4 * 16 * 16 : 12) * 32 / 6 * (double)repeats;
    return summed_rate(threads, &own);
#else
    (void)threads;
    return own.work;
#endif
}
