/* Records when each thread works on each region or task of a run. Kernels run unchanged. */
#include "korch_runtime.h"

/* The work of a thread in a region, or a task that it ran or waited for; the same layout as `Record` in
 * korch/report/threads_worker.py. The region of a step that all threads of a plan run is -1 - the step's number. */
typedef struct {
    int64_t number, thread, is_wait, rest[4], begin_ns, end_ns, wait_ns;
} record;

int korch_traces;

static int64_t regions, count, limit, first_ns;
static record *records;
static _Thread_local int64_t waited_ns, working_since_ns;

int64_t korch_trace_region(void) { return __atomic_fetch_add(&regions, 1, __ATOMIC_RELAXED); }

void korch_trace_begun(int64_t now_ns) { first_ns = now_ns; }

void korch_trace_wait(int64_t since_ns) { waited_ns += korch_now_ns() - since_ns; }

static void add(record own, const int64_t *rest) {
    own.end_ns = korch_now_ns();
    const int64_t at = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    if (rest) memcpy(own.rest, rest, sizeof own.rest);
    if (at < limit) records[at] = own;
}

void korch_trace_work(int64_t region, int64_t me, bool begins) {
    if (korch_traces != 1) return;
    if (begins) waited_ns = 0, working_since_ns = korch_now_ns();
    else add((record){.number = region, .thread = me, .begin_ns = working_since_ns, .wait_ns = waited_ns}, NULL);
}

void korch_trace_task(bool is_wait, int64_t me, int64_t task, const int64_t *rest, int64_t since_ns) {
    add((record){.number = task, .thread = me, .is_wait = is_wait, .begin_ns = since_ns}, rest);
}

/* Run a plan once, and record its regions (and the times of its kernels) or its tasks; returns what `korch_run` does. */
KORCH_API int korch_watch(int traces, korch_handle *handle, const void *const *inputs, void *const *outputs,
                          int64_t *kernel_ns, record *into, int64_t room, int64_t *found, int64_t *begun_ns) {
    records = into, limit = room;
    regions = count = 0;
    korch_traces = traces;
    const int code = korch_run_timed(handle, inputs, outputs, kernel_ns);
    korch_traces = 0;
    *found = count, *begun_ns = first_ns;
    return code;
}
