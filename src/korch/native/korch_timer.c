/* Measures the times of kernels, for the measuring process. */
#include "korch_runtime.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

/* -- Absence -------------------------------------------------------------------------------------------------------- */

/* Read the first characters of an open file of the system; return whether there are some. */
static bool read_report(int file, char *text, size_t size) {
    const ssize_t count = file < 0 ? -1 : pread(file, text, size - 1, 0);
    text[count < 0 ? 0 : count] = 0;
    return count > 0;
}

/* Nanoseconds for which a thread was runnable but had no core, since its start; -1 if unknown. */
static int64_t waited_ns(int file) {
    char text[96];
    long long running = 0, waiting = -1;
    return read_report(file, text, sizeof text) && sscanf(text, "%lld %lld", &running, &waiting) == 2 ? waiting : -1;
}

/* Nanoseconds for which other virtual machines used this machine's cores (steal time); 0 if unknown. */
static int64_t stolen_ns(void) {
    static int file;
    char text[256];
    long long ticks = 0;
    if (file == 0) file = open("/proc/stat", O_RDONLY | O_CLOEXEC);
    if (!read_report(file, text, sizeof text)) return 0;
    sscanf(text, "cpu %*d %*d %*d %*d %*d %*d %*d %lld", &ticks);
    return ticks * (1000000000LL / sysconf(_SC_CLK_TCK));
}

static int64_t involuntary_switches(void) {
    struct rusage used;
    return getrusage(RUSAGE_SELF, &used) == 0 ? used.ru_nivcsw : 0;
}

/* A thread before a run: the system's report about it, for how long it has waited for a core, and how long of that while the
 * threads met. */
typedef struct {
    int file;
    int64_t waited_ns, late_ns;
} runner;

typedef struct {
    int64_t stolen_ns, switches;
    runner runners[KORCH_MOST_THREADS];
} absence;

static int meet_runners(void *given, korch_member *own) {
    static _Thread_local int file;
    runner *const found = &((absence *)given)->runners[own->me];
    if (file == 0) file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    const int64_t first_ns = waited_ns(file);
    if (own->threads > 1) own->meet(own);
    const int64_t now_ns = waited_ns(file);
    *found = (runner){file, now_ns, now_ns - first_ns};
    return 0;
}

/* Try a few times to return at a moment when every thread has a core. */
static void begin_absence(absence *own, int64_t threads) {
    enum { TRIES = 10 };
    bool is_late = true;
    for (int turn = 0; turn < TRIES && is_late; ++turn) {
        own->stolen_ns = stolen_ns();
        own->switches = involuntary_switches();
        korch_parallel(threads, meet_runners, own, NULL);
        is_late = false;
        for (int64_t i = 0; i < threads; ++i) is_late |= own->runners[i].late_ns > 0;
    }
}

/* The longest time that a thread waited for a core during a run of `taken_ns` that has just ended. If the system only counts
 * context switches, a switch counts as a wait of the whole run. */
static int64_t end_absence(const absence *own, int64_t threads, int64_t taken_ns) {
    int64_t most_ns = -1;
    for (int64_t i = 0; i < threads; ++i) {
        const int64_t now_ns = waited_ns(own->runners[i].file), wait_ns = now_ns - own->runners[i].waited_ns;
        if (now_ns >= 0 && wait_ns > most_ns) most_ns = wait_ns;
    }
    if (most_ns < 0) most_ns = involuntary_switches() > own->switches ? taken_ns : 0;
    const int64_t away_ns = most_ns + stolen_ns() - own->stolen_ns;
    return away_ns < taken_ns ? away_ns : taken_ns;
}

/* -- Times ---------------------------------------------------------------------------------------------------------- */

typedef int (*run_function)(void *state, void *const *buffers);

/* Nanoseconds for `repeats` runs; negative if a run fails. */
static int64_t time_runs(run_function run, void *state, void *const *buffers, int64_t repeats) {
    const int64_t start_ns = korch_now_ns();
    for (int64_t i = 0; i < repeats; ++i)
        if (run(state, buffers) != 0) return -1;
    return korch_now_ns() - start_ns;
}

/* The least nanoseconds of `repeats` runs without buffers, of those that begin within limit_ns: on a busy machine, a region may
 * wait for its threads for a whole time slice. */
KORCH_API int64_t korch_least_time(run_function run, int64_t repeats, int64_t limit_ns) {
    int64_t best_ns = INT64_MAX;
    for (const int64_t end_ns = korch_now_ns() + limit_ns; korch_now_ns() < end_ns;) {
        const int64_t taken_ns = time_runs(run, NULL, NULL, repeats);
        if (taken_ns < best_ns) best_ns = taken_ns;
    }
    return best_ns;
}

typedef struct {
    char *at;
    int64_t size;
} span;

/* What is in caches before a run; the same layout as `Freshness` in korch/measure/worker.py. */
typedef struct {
    KORCH_TABLE(span) inputs, cold;
    span other;
    int64_t own_cache_bytes, threads;
} freshness;

/* Flush cache lines from all caches. clflushopt flushes concurrently: flushing one by one takes 30 times as long. */
static void evict(char *from, int64_t lines) {
#if defined(__x86_64__)
    static int at_once = -1;
    if (at_once < 0) at_once = !korch_missing_flag("clflushopt ");
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
    for (int64_t k = 0; k < what->cold.count; ++k) {
        const span *const cold = &what->cold.rows[k];
        const int64_t lines = (cold->size + 63) / 64, first = lines * me / threads;
        evict(cold->at + 64 * first, lines * (me + 1) / threads - first);
    }
    const int64_t lines = what->other.size / 64 / threads;
    const char *const part = what->other.at + 64 * lines * me;
    int64_t at = other_at;
    char sum = 0;
#define READ_ANOTHER (at = at + 1 < lines ? at + 1 : 0, sum = (char)(sum + part[64 * at]))
    for (int64_t i = 0; i < what->own_cache_bytes / 64; ++i) READ_ANOTHER;
    if (threads > 1) own->meet(own);
    for (int64_t k = 0; k < what->inputs.count; ++k) {
        const int64_t all = (what->inputs.rows[k].size + 63) / 64;
        for (int64_t i = all * me / threads; i < all * (me + 1) / threads; ++i) {
            READ_ANOTHER;
            volatile char *const line = what->inputs.rows[k].at + 64 * i;
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
KORCH_API int64_t korch_time_fresh(run_function run, void *state, void *const *buffers, const freshness *what,
                                   int64_t *away_ns) {
    static absence absence;
    korch_parallel(what->threads, make_fresh, (void *)what, NULL);
    begin_absence(&absence, what->threads);
    const int64_t taken_ns = time_runs(run, state, buffers, 1);
    *away_ns = taken_ns < 0 ? 0 : end_absence(&absence, what->threads, taken_ns);
    return taken_ns;
}
