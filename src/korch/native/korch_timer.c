/* Measures the times of kernels, for the measuring process. */
#include "korch_runtime.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

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
#else
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
