/* A preloaded library that records when each thread works on each parallel region of a run.
 *
 * Code compiled by GCC calls GOMP_parallel for every parallel region, and GOMP_barrier for barriers.
 * (Code compiled by GCC before 4.9, which oneDNN's package may contain, calls GOMP_parallel_start and
 * GOMP_parallel_end around the calling thread's own share instead.) This library wraps these functions
 * to read the clock; kernels run unchanged. A timed run first reads the clock when its first kernel
 * begins, so the kernels' times tell to which kernel a region belongs.
 */
#include <atomic>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

namespace {

/* The work of one thread in one region; the same layout as `RegionRecord` in korch/report/threads_worker.py. */
struct span {
    int64_t region, thread, begin_ns, end_ns, wait_ns;
};

/* A task that a thread ran or waited for; the same layout as `TaskRecord` in korch/report/threads_worker.py. */
struct task_span {
    int64_t is_wait, thread, task, step, stage, begin, end, begin_ns, end_ns;
};

struct job {
    void (*run)(void *);
    void *data;
    int64_t region;
};

void (*real_parallel)(void (*)(void *), void *, unsigned, unsigned);
void (*real_start)(void (*)(void *), void *, unsigned);
void (*real_end)(void);
void (*real_barrier)(void);
int (*real_thread)(void);
int (*real_clock)(clockid_t, timespec *);

std::atomic<bool> is_on{false};
std::atomic<int64_t> regions, count, first_ns;
std::atomic<bool> sees_tasks{false};
span *spans;
task_span *task_spans;
int64_t limit;
thread_local int64_t waited_ns;

/* The region that the thread has opened by GOMP_parallel_start, and when; none if `run` is null. */
thread_local job started;
thread_local int64_t started_ns;

/* Whether the thread is in a recorded region: nested regions count as its work and are not recorded. */
thread_local bool is_inside;

/* Whether regions that the thread opens don't belong to a kernel, but surround several kernels. */
thread_local bool is_hidden;

int64_t now_ns() {
    timespec time;
    real_clock(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void note_task(task_span own) {
    own.end_ns = now_ns(), own.thread = real_thread();
    const int64_t at = count.fetch_add(1);
    if (at < limit) task_spans[at] = own;
}

void note(int64_t region, int64_t begin_ns, int64_t end_ns) {
    const int64_t at = count.fetch_add(1);
    if (at < limit) spans[at] = {region, real_thread(), begin_ns, end_ns, waited_ns};
}

/* Called when the thread begins or ends its work on a region. */
void work(int64_t region, bool begins) {
    static thread_local int64_t since_ns;
    is_inside = begins;
    if (begins) waited_ns = 0, since_ns = now_ns();
    else note(region, since_ns, now_ns());
}

void watched(void *pointer) {
    const job *own = (const job *)pointer;
    work(own->region, true);
    own->run(own->data);
    work(own->region, false);
}

__attribute__((constructor)) void find_real() {
    real_clock = (decltype(real_clock))dlsym(RTLD_NEXT, "clock_gettime");
    const char *name = getenv("KORCH_OPENMP");
    void *library = dlopen(name && *name ? name : "libgomp.so.1", RTLD_LAZY);
    if (!library) return;
    real_parallel = (decltype(real_parallel))dlsym(library, "GOMP_parallel");
    real_start = (decltype(real_start))dlsym(library, "GOMP_parallel_start");
    real_end = (decltype(real_end))dlsym(library, "GOMP_parallel_end");
    real_barrier = (decltype(real_barrier))dlsym(library, "GOMP_barrier");
    real_thread = (decltype(real_thread))dlsym(library, "omp_get_thread_num");
}

} // namespace

extern "C" {

void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    if (!is_on || is_inside || is_hidden) return real_parallel(run, data, threads, flags);
    job own = {run, data, regions.fetch_add(1)};
    real_parallel(watched, &own, threads, flags);
}

void GOMP_parallel_start(void (*run)(void *), void *data, unsigned threads) {
    if (!is_on || is_inside || started.run) return real_start(run, data, threads);
    started = {run, data, regions.fetch_add(1)};
    waited_ns = 0;
    real_start(watched, &started, threads);
    started_ns = now_ns();
}

void GOMP_parallel_end(void) {
    if (started.run) note(started.region, started_ns, now_ns());
    real_end();
    started.run = nullptr; // only now: a late thread may read it until the region has ended
}

void GOMP_barrier(void) {
    if (!is_on) return real_barrier();
    const int64_t begin_ns = now_ns();
    real_barrier();
    waited_ns += now_ns() - begin_ns;
}

/* The next five functions are called by `korch_runtime.cpp`, `korch_wait.h` and `korch_tasks.h`, when threads run steps of
 * a plan in one region. */
void korch_threads_task(int64_t task, int64_t step, int64_t stage, int64_t begin, int64_t end, int64_t since_ns) {
    if (sees_tasks) note_task({0, 0, task, step, stage, begin, end, since_ns, 0});
}

void korch_threads_waited(int64_t task, int64_t since_ns) {
    if (sees_tasks) note_task({1, 0, task, 0, 0, 0, 0, since_ns, 0});
}

void korch_threads_hide(int begins) { is_hidden = begins; }

/* A step is recorded as a negative region number. */
void korch_threads_work(int64_t step, int begins) {
    if (is_on) work(-1 - step, begins);
}

void korch_threads_wait(int begins) {
    static thread_local int64_t since_ns;
    if (!is_on) return;
    if (begins) since_ns = now_ns();
    else waited_ns += now_ns() - since_ns;
}

int clock_gettime(clockid_t clock, timespec *time) {
    if (!real_clock) real_clock = (decltype(real_clock))dlsym(RTLD_NEXT, "clock_gettime");
    const int code = real_clock(clock, time);
    if (is_on && clock == CLOCK_MONOTONIC && !first_ns)
        first_ns = (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
    return code;
}

/* Run a plan once. Returns the result of `run_timed`, or -1 if the OpenMP library's functions were not found. */
int korch_threads_run(int (*run_timed)(void *, const void *const *, void *const *, int64_t *),
                      void *handle, const void *const *inputs, void *const *outputs,
                      int64_t *kernel_ns, span *into, int64_t room, int64_t *found,
                      int64_t *begun_ns) {
    if (!real_parallel || !real_start || !real_end || !real_barrier || !real_thread || !real_clock)
        return -1;
    spans = into, limit = room;
    regions = count = first_ns = 0;
    is_on = true;
    const int code = run_timed(handle, inputs, outputs, kernel_ns);
    is_on = false;
    *found = count, *begun_ns = first_ns;
    return code;
}

/* Run a plan once as tasks; `begun_ns` receives the time of its begin. Returns the result of `run`, or -1 if the OpenMP
 * library's functions were not found. */
int korch_threads_run_tasks(int (*run)(void *, const void *const *, void *const *), void *handle,
                            const void *const *inputs, void *const *outputs, task_span *into, int64_t room,
                            int64_t *found, int64_t *begun_ns) {
    if (!real_thread || !real_clock) return -1;
    task_spans = into, limit = room;
    count = 0;
    *begun_ns = now_ns();
    sees_tasks = true;
    const int code = run(handle, inputs, outputs);
    sees_tasks = false;
    *found = count;
    return code;
}

} // extern "C"
