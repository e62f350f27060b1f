/* Measures the times of kernels and the rates of the machine, for the measuring process and the calibration. */
#include "korch_runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { HUGE_PAGE = 2 << 20, BLOCK = 128 };  /* BLOCK: the floats that one iteration of a loop accesses */
static const int64_t CHUNK_BYTES = 8 << 20; /* much longer than the clock resolution, shorter than a time slice */

/* -- Loops for each size of vectors --------------------------------------------------------------------------------- */

typedef struct {
    int lanes;
    void (*read)(const float *at, int64_t count), (*write)(float *at, int64_t count), (*stream)(float *at, int64_t count);
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
    TARGET static void read##LANES(const float *at, int64_t count) { \
        vector##LANES sums[8] = {{0}}; \
        for (int64_t i = 0; i < count; i += 8 * LANES) \
            for (int u = 0; u < 8; ++u) sums[u] += *(const vector##LANES *)(at + i + LANES * u); \
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
    static const loops loops##LANES = {LANES, read##LANES, write##LANES, stream##LANES, multiply##LANES};
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
    void (*pass)(const float *at, int64_t count); /* over memory; null for arithmetic */
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

/* The summed rate of passes over `bytes` of memory per thread, in bytes per second. */
static double memory_rate(int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes,
                          void (*pass)(const float *, int64_t)) {
    rate own = {.chunk = pass_chunk, .chunks = chunks, .chunk_bytes = chunk_bytes, .work = (double)chunk_bytes, .pass = pass};
    own.count = bytes / (int64_t)sizeof(float) / BLOCK * BLOCK;
    const int64_t all = own.count * threads, size = all * (int64_t)sizeof(float);
    own.memory = own.count == 0 ? NULL : kept_memory((size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (!own.memory) return 0;
    own.is_new = all > kept_ones;
    const double found = summed_rate(threads, &own);
    if (own.is_new) kept_ones = all;
    return found;
}

/* The rates of reading, of writing, and of writing past the caches, in bytes per second: on `bytes` of memory per thread, in
 * `chunks` chunks of `chunk_bytes`, or of 8 MiB. */
KORCH_API double korch_pass_rate(int64_t bytes, int threads, int64_t chunks, int64_t chunk_bytes) {
    return memory_rate(bytes, threads, chunks, chunk_bytes, chosen->read);
}

KORCH_API double korch_read_rate(int64_t bytes, int threads, int64_t chunks) {
    return memory_rate(bytes, threads, chunks, CHUNK_BYTES, chosen->read);
}

KORCH_API double korch_write_rate(int64_t bytes, int threads, int64_t chunks) {
    return memory_rate(bytes, threads, chunks, CHUNK_BYTES, (void (*)(const float *, int64_t))chosen->write);
}

KORCH_API double korch_stream_rate(int64_t bytes, int threads, int64_t chunks) {
    return memory_rate(bytes, threads, chunks, CHUNK_BYTES, (void (*)(const float *, int64_t))chosen->stream);
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

/* -- Absence -------------------------------------------------------------------------------------------------------- */

/* Read the first characters of a file of the system that is read repeatedly, and opened once; return whether it exists. */
static bool read_report(int *file, const char *path, char *text, size_t size) {
    if (*file == 0) *file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t count = *file < 0 ? -1 : pread(*file, text, size - 1, 0);
    text[count < 0 ? 0 : count] = 0;
    return count > 0;
}

/* Nanoseconds since the thread's start for which it was runnable but had no core; -1 if unknown. */
static int64_t waited_ns(void) {
    static _Thread_local int file;
    char text[96];
    long long running = 0, waiting = -1;
    const bool is_known = read_report(&file, "/proc/thread-self/schedstat", text, sizeof text);
    return is_known && sscanf(text, "%lld %lld", &running, &waiting) == 2 ? waiting : -1;
}

/* Nanoseconds for which other virtual machines used this machine's cores (steal time); 0 if unknown. */
static int64_t stolen_ns(void) {
    static int file;
    char text[256];
    long long ticks = 0;
    if (!read_report(&file, "/proc/stat", text, sizeof text)) return 0;
    sscanf(text, "cpu %*d %*d %*d %*d %*d %*d %*d %lld", &ticks);
    return ticks * (1000000000LL / sysconf(_SC_CLK_TCK));
}

static int64_t involuntary_switches(void) {
    struct rusage used;
    return getrusage(RUSAGE_SELF, &used) == 0 ? used.ru_nivcsw : 0;
}

/* The longest time that a thread waited for a core between `begin_absence` and `end_absence`. */
typedef struct {
    int64_t stolen_ns, switches, ended_ns, most_ns;
} absence;

static _Thread_local int64_t before_ns;

static void raise_to(int64_t *most, int64_t value) {
    int64_t now = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (value > now && !__atomic_compare_exchange_n(most, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static int begin_wait(void *given, korch_member *own) {
    const int64_t first_ns = waited_ns();
    if (own->threads > 1) own->meet(own);
    before_ns = waited_ns();
    raise_to(&((absence *)given)->most_ns, before_ns - first_ns);
    return 0;
}

/* Waits after the run, which make a thread late here, are subtracted. */
static int end_wait(void *given, korch_member *own) {
    (void)own;
    absence *const found = given;
    const int64_t all_ns = waited_ns(), late_ns = korch_now_ns() - found->ended_ns;
    if (all_ns >= 0) raise_to(&found->most_ns, all_ns > before_ns + late_ns ? all_ns - before_ns - late_ns : 0);
    return 0;
}

/* Try a few times to return at a moment when every thread has a core. */
static void begin_absence(absence *own, int threads) {
    enum { TRIES = 10 };
    own->most_ns = 1;
    for (int turn = 0; turn < TRIES && own->most_ns > 0; ++turn) {
        *own = (absence){stolen_ns(), involuntary_switches(), 0, 0};
        korch_parallel(threads, begin_wait, own, NULL);
    }
}

/* The longest wait during a run of `taken_ns` that has just ended. If the system only counts context switches, a switch counts
 * as a wait of the whole run. */
static int64_t end_absence(absence *own, int threads, int64_t taken_ns) {
    own->ended_ns = korch_now_ns();
    own->most_ns = -1;
    korch_parallel(threads, end_wait, own, NULL);
    if (own->most_ns < 0) own->most_ns = involuntary_switches() > own->switches ? taken_ns : 0;
    const int64_t away_ns = own->most_ns + stolen_ns() - own->stolen_ns;
    return away_ns < taken_ns ? away_ns : taken_ns;
}

/* -- Times ---------------------------------------------------------------------------------------------------------- */

typedef int (*run_function)(void *state, void *const *buffers);

KORCH_API int korch_nothing(void *state, void *const *buffers) {
    (void)state, (void)buffers;
    return 0;
}

/* Nanoseconds for `repeats` runs; negative if a run fails. */
KORCH_API int64_t korch_time(run_function run, void *state, void *const *buffers, int64_t repeats) {
    const int64_t start_ns = korch_now_ns();
    for (int64_t i = 0; i < repeats; ++i)
        if (run(state, buffers) != 0) return -1;
    return korch_now_ns() - start_ns;
}

typedef struct {
    char *at;
    int64_t size;
} korch_span;

typedef struct {
    const korch_span *inputs;
    int64_t count;
    const korch_span *cold;
    int64_t cold_count;
    const korch_span *other;
    int64_t own_cache_bytes;
} freshness;

/* Flush cache lines from all caches. clflushopt flushes concurrently: flushing one by one takes 30 times as long. */
static void evict(char *from, int64_t lines) {
#if defined(__x86_64__)
    static int at_once = -1;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (at_once < 0) at_once = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 23);
    for (int64_t i = 0; i < lines; ++i) {
        if (at_once) __asm__ volatile(".byte 0x66; clflush %0" : "+m"(from[64 * i])); /* clflushopt */
        else __asm__ volatile("clflush %0" : "+m"(from[64 * i]));
    }
    __asm__ volatile("mfence" : : : "memory");
#elif defined(__aarch64__)
    for (int64_t i = 0; i < lines; ++i) __asm__ volatile("dc civac, %0" : : "r"(from + 64 * i) : "memory");
#endif
}

static _Thread_local int64_t other_at; /* where the thread continues to read other memory */

static int make_fresh(void *given, korch_member *own) {
    const freshness *const what = given;
    const int64_t me = own->me, threads = own->threads;
    for (int64_t k = 0; k < what->cold_count; ++k) {
        const int64_t lines = (what->cold[k].size + 63) / 64, first = lines * me / threads;
        evict(what->cold[k].at + 64 * first, lines * (me + 1) / threads - first);
    }
    const int64_t lines = what->other->size / 64 / threads;
    const char *const part = what->other->at + 64 * lines * me;
    int64_t at = other_at;
    char sum = 0;
#define READ_ANOTHER (at = at + 1 < lines ? at + 1 : 0, sum = (char)(sum + part[64 * at]))
    for (int64_t i = 0; i < what->own_cache_bytes / 64; ++i) READ_ANOTHER;
    if (threads > 1) own->meet(own);
    for (int64_t k = 0; k < what->count; ++k) {
        const int64_t all = (what->inputs[k].size + 63) / 64;
        for (int64_t i = all * me / threads; i < all * (me + 1) / threads; ++i) {
            READ_ANOTHER;
            volatile char *const line = what->inputs[k].at + 64 * i;
            *line = *line;
        }
    }
    __asm__ volatile("" : : "r"(sum) : "memory");
    other_at = at;
    return 0;
}

/* Nanoseconds of one run with caches in the state that they have in a plan; negative if the run fails. First, the buffers in
 * `cold` are flushed from all caches. Then each thread reads enough of its part of `other`, which is larger than the cores'
 * private caches, to evict weights and outputs from the private caches. Then the threads write the inputs, each its part,
 * and read as many other bytes, as the preceding kernels of a plan would. `away_ns` receives the longest time that a thread
 * had no core during the run. */
KORCH_API int64_t korch_time_fresh(run_function run, void *state, void *const *buffers, const korch_span *inputs,
                                   int64_t count, const korch_span *cold, int64_t cold_count, const korch_span *other,
                                   int64_t own_cache_bytes, int threads, int64_t *away_ns) {
    freshness what = {inputs, count, cold, cold_count, other, own_cache_bytes};
    korch_parallel(threads, make_fresh, &what, NULL);
    absence absence;
    begin_absence(&absence, threads);
    const int64_t taken_ns = korch_time(run, state, buffers, 1);
    *away_ns = taken_ns < 0 ? 0 : end_absence(&absence, threads, taken_ns);
    return taken_ns;
}

static int do_nothing(void *given, korch_member *own) {
    (void)given, (void)own;
    return 0;
}

/* The least time of an empty region in nanoseconds, of those that begin within limit_ns: on a busy machine, a region may wait
 * for its threads for a whole time slice. */
KORCH_API int64_t korch_region_ns(int64_t limit_ns) {
    int64_t best_ns = INT64_MAX;
    const int64_t begin_ns = korch_now_ns();
    for (int64_t start_ns = begin_ns; start_ns - begin_ns < limit_ns;) {
        korch_parallel(korch_max_threads(), do_nothing, NULL, NULL);
        const int64_t end_ns = korch_now_ns();
        if (end_ns - start_ns < best_ns) best_ns = end_ns - start_ns;
        start_ns = end_ns;
    }
    return best_ns;
}

/* -- What threads cost each other (benchmarks/core_costs.py) --------------------------------------------------------- */

enum { JOINS = 5000, WORDS = 32768, TURNS = 20 };

typedef struct {
    korch_count asked[2];
    uint64_t words[WORDS];
    double ns; /* of the last thread */
} exchange;

static int join(void *given, korch_member *own) {
    const int64_t since_ns = korch_now_ns();
    for (int i = 0; i < JOINS; ++i) own->meet(own);
    if (own->me == own->threads - 1) ((exchange *)given)->ns = (double)(korch_now_ns() - since_ns) / JOINS;
    return 0;
}

static int ask(void *given, korch_member *own) {
    exchange *const all = given;
    const bool asks = own->me == own->threads - 1;
    own->meet(own);
    const int64_t since_ns = korch_now_ns();
    for (uint32_t i = 1; i <= JOINS && (asks || own->me == 0); ++i) {
        if (asks) korch_set(&all->asked[1], i);
        korch_wait_for(&all->asked[!asks], i, korch_look_ns(1));
        if (!asks) korch_set(&all->asked[0], i);
    }
    if (asks) all->ns = (double)(korch_now_ns() - since_ns) / JOINS / 2;
    return 0;
}

static int fetch(void *given, korch_member *own) {
    exchange *const all = given;
    double ns = 0;
    for (int turn = 0; turn < TURNS; ++turn) {
        for (int i = 0; own->me == 0 && i < WORDS; ++i) all->words[i] += (uint64_t)turn;
        own->meet(own);
        for (int again = 0; again < 2 && own->me == own->threads - 1; ++again) {
            const int64_t since_ns = korch_now_ns();
            uint64_t sum = 0;
            for (int i = 0; i < WORDS; ++i) sum += all->words[i];
            __asm__ volatile("" : : "r"(sum) : "memory");
            ns += (again ? -1.0 : 1.0) * (double)(korch_now_ns() - since_ns);
        }
        own->meet(own);
    }
    if (own->me == own->threads - 1) all->ns = ns / TURNS / (8 * WORDS);
    return 0;
}

static double exchange_ns(int threads, korch_job job) {
    exchange *const all = korch_allocate(sizeof *all);
    if (!all) return 0;
    korch_parallel(threads, job, all, NULL);
    const double ns = all->ns;
    free(all);
    return ns;
}

/* Of a barrier; of half of what it takes until a thread has an answer of another one; of a byte from another core's cache. */
KORCH_API double korch_join_ns(int threads) { return exchange_ns(threads, join); }
KORCH_API double korch_wait_ns(int threads) { return exchange_ns(threads, ask); }
KORCH_API double korch_fetch_ns_per_byte(int threads) { return exchange_ns(threads, fetch); }
