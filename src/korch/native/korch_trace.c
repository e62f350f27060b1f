/* Records when each thread works on each region and task of a run. Kernels run unchanged. */
#include "korch_runtime.h"

/* The work of one thread in one region; the same layout as `RegionRecord` in korch/report/threads_worker.py. The region of a
 * step that all threads of a plan run is -1 - the step's number. */
typedef struct {
    int64_t region, thread, begin_ns, end_ns, wait_ns;
} span;

/* A task that a thread ran or waited for; the same layout as `TaskRecord` in korch/report/threads_worker.py. */
typedef struct {
    int64_t is_wait, thread, task, rest[4], begin_ns, end_ns;
} task_span;

int korch_traces;

static int64_t regions, count, limit, first_ns;
static span *spans;
static task_span *task_spans;
static _Thread_local int64_t waited_ns, working_since_ns;

int64_t korch_trace_region(void) { return __atomic_fetch_add(&regions, 1, __ATOMIC_RELAXED); }

void korch_trace_begun(int64_t now_ns) { first_ns = now_ns; }

void korch_trace_wait(int64_t since_ns) { waited_ns += korch_now_ns() - since_ns; }

void korch_trace_work(int64_t region, int64_t me, bool begins) {
    if (korch_traces != 1) return;
    if (begins) {
        waited_ns = 0, working_since_ns = korch_now_ns();
        return;
    }
    const int64_t at = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    if (at < limit) spans[at] = (span){region, me, working_since_ns, korch_now_ns(), waited_ns};
}

void korch_trace_task(int64_t is_wait, int64_t me, int64_t task, const int64_t *rest, int64_t since_ns) {
    const int64_t now_ns = korch_now_ns(), at = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    if (at >= limit) return;
    task_spans[at] = (task_span){is_wait, me, task, {0}, since_ns, now_ns};
    if (rest) memcpy(task_spans[at].rest, rest, sizeof task_spans[at].rest);
}

/* Run a plan once; returns what `korch_run_timed` does. */
KORCH_API int korch_watch_run(korch_handle *handle, const void *const *inputs, void *const *outputs, int64_t *kernel_ns,
                              span *into, int64_t room, int64_t *found, int64_t *begun_ns) {
    spans = into, limit = room;
    regions = count = 0;
    korch_traces = 1;
    const int code = korch_run_timed(handle, inputs, outputs, kernel_ns);
    korch_traces = 0;
    *found = count, *begun_ns = first_ns;
    return code;
}

/* Run a plan once as tasks; returns what `korch_run` does. */
KORCH_API int korch_watch_tasks(korch_handle *handle, const void *const *inputs, void *const *outputs, task_span *into,
                                int64_t room, int64_t *found, int64_t *begun_ns) {
    task_spans = into, limit = room;
    count = 0;
    korch_traces = 2;
    const int code = korch_run(handle, inputs, outputs);
    korch_traces = 0;
    *found = count, *begun_ns = first_ns;
    return code;
}
