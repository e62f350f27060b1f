/* Runs plans: walks the tables that `korch.runtime.source` prints. */
#include "korch_oversubscription.h"
#include "korch_runtime.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };

/* Runs that take longer than this can be interrupted: a user would not wait for their end. */
static const int64_t LONG_RUN_NS = 20000000;

/* Where a buffer is: `at` is an offset in the arena, or the number of a constant, input or output. `offset` is, for a part of
 * an output, its byte offset in the output; in the arena, the distance between the buffers of two threads. */
enum { ARENA, CONSTANT, INPUT, OUTPUT };
typedef struct {
    int64_t place, at, offset;
} slot;

/* A model output that no kernel writes in place. */
typedef struct {
    int64_t output;
    slot from;
} copy;

/* Steps [begin, end) that run as tasks: in segment s, thread t runs the tasks from first_tasks[s * queues + t] up to but not
 * including first_tasks[s * queues + t + 1]. */
typedef struct {
    int64_t begin, end;
} segment;

/* A range of grid points of one stage of a step, or, if the stage is -1, the whole step. It waits for the entries of `waits`
 * from `first_wait` up to the next task's `first_wait`. */
typedef struct {
    int64_t step, stage, begin, end, first_wait;
} task;

/* A condition of a task: the thread of `queue` must have finished this number of tasks. */
typedef struct {
    int64_t queue, ended;
} condition;

typedef struct {
    korch_plan tensors;
    korch_steps steps; /* consecutive ones without `is_alone` run in one region */
    KORCH_TABLE(char *const) symbols; /* of the kernels; "" for a concatenation in place */
    KORCH_TABLE(slot) slots;       /* the buffers of all steps, one step after the other */
    KORCH_TABLE(int64_t) bindings; /* the slots whose pointers differ from run to run */
    KORCH_TABLE(copy) copies;
    KORCH_TABLE(segment) segments;
    KORCH_TABLE(int64_t) first_tasks;
    KORCH_TABLE(task) tasks;       /* of all queues, one queue after the other; the last one only ends `waits` */
    KORCH_TABLE(condition) waits;
    int64_t arena_bytes;
    int64_t queues;                /* one per thread, at least 1 */
} tables;

/* -- Handles -------------------------------------------------------------------------------------------------------- */

struct korch_handle {
    korch_hooks hooks;
    const tables *plan;
    int64_t threads;
    char *arena;
    const void *const *constants;
    void **table; /* the buffers of all steps, for each thread */
    void **states;
    korch_count *ended; /* for each queue: the number of the task after the one that has ended last; 0 before the first */
    /* Of a run. Consecutive steps run in one region; between two steps, the first thread decides whether the others stop. */
    int64_t *kernel_ns;        /* null unless the run is timed */
    oversubscription *watched; /* null: none is detected */
    int64_t from, end;         /* the steps that run in one region, or the step that runs apart */
    int failed;                /* atomic: 1 + the number of a step that failed, KORCH_INTERRUPTED, or 0 */
    bool watches;              /* whether interrupts end this run */
    bool stops;
    int64_t came_ns;  /* when all threads had arrived at the last barrier */
    int64_t start_ns; /* in timed runs: when the next kernel begins */
    /* Of the runs so far. */
    oversubscription oversubscription;
    int64_t *usual_ns; /* the usual time of each step that runs apart; see note_step */
    int64_t took_ns;   /* the time of the last run; 0 before the first */
    pthread_mutex_t mutex;
    korch_handle *next; /* in the list of all handles */
};

static pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;
static korch_handle *handles;

void korch_hold_handles(bool holds) {
    if (holds) pthread_mutex_lock(&handles_mutex);
    for (korch_handle *h = handles; h; h = h->next) (holds ? pthread_mutex_lock : pthread_mutex_unlock)(&h->mutex);
    if (!holds) pthread_mutex_unlock(&handles_mutex);
}

/* Before the memory that korch_allocate returns: where its allocation begins, and the bytes of a mapping, or 0. */
typedef struct {
    void *base;
    size_t mapped;
} allocation;

void *korch_allocate(int64_t size) {
    const size_t step = size >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT, mapped = size >= HUGE_PAGE ? (size_t)size + 2 * step : 0;
    void *const base = mapped ? mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                              : calloc(1, (size_t)(size > 0 ? size : 1) + 3 * step);
    if (!base || base == MAP_FAILED) return NULL;
    char *const memory = (char *)(((uintptr_t)base + 2 * step - 1) / step * step);
    if (mapped) madvise(memory, (size_t)size, MADV_HUGEPAGE); /* the page before it is a small one */
    ((allocation *)memory)[-1] = (allocation){base, mapped};
    return memory;
}

void korch_release(void *memory) {
    if (!memory) return;
    const allocation own = ((allocation *)memory)[-1];
    if (own.mapped) munmap(own.base, own.mapped);
    else free(own.base);
}

static void **table_of(const korch_handle *h, int64_t thread) { return h->table + thread * h->plan->slots.count; }

static void *locate(const korch_handle *h, const slot *from, int64_t thread, const void *const *inputs, void *const *outputs) {
    switch (from->place) {
    case ARENA: return h->arena + from->at + thread * from->offset;
    case CONSTANT: return (void *)h->constants[from->at];
    case INPUT: return (void *)inputs[from->at];
    default: return (char *)outputs[from->at] + from->offset;
    }
}

/* Set the pointers that differ from run to run. */
static void bind_tensors(korch_handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < h->plan->bindings.count; ++i) {
        const int64_t binding = h->plan->bindings.rows[i];
        void *const at = locate(h, &h->plan->slots.rows[binding], 0, inputs, outputs);
        for (int64_t t = 0; t < h->threads; ++t) table_of(h, t)[binding] = at;
    }
}

static void copy_outputs(const korch_handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < h->plan->copies.count; ++i) {
        const copy *const row = &h->plan->copies.rows[i];
        const void *const from = locate(h, &row->from, 0, inputs, outputs);
        const size_t size = (size_t)h->plan->tensors.outputs.rows[row->output].size_bytes;
        if (size && outputs[row->output] != from) memcpy(outputs[row->output], from, size); /* a state may be both */
    }
}

/* -- Interrupts ----------------------------------------------------------------------------------------------------- */

static struct sigaction before_watch;
static bool is_interrupted;

static void note_interrupt(int number, siginfo_t *info, void *context) {
    __atomic_store_n(&is_interrupted, true, __ATOMIC_RELAXED);
    if (before_watch.sa_flags & SA_SIGINFO) before_watch.sa_sigaction(number, info, context);
    else before_watch.sa_handler(number);
}

/* Begin to note SIGINT in the main thread, and return whether that is done. It sets a flag and then calls the handler that was installed before. (Python's handler alone would not end a run: it,
 * too, only sets a flag until the run has ended.) This costs some system calls, so short runs do not use it. */
static bool watch_interrupts(void) {
    if (syscall(SYS_gettid) != getpid()) return false;
    if (sigaction(SIGINT, NULL, &before_watch) != 0) return false;
    if (before_watch.sa_handler == SIG_DFL || before_watch.sa_handler == SIG_IGN) return false;
    __atomic_store_n(&is_interrupted, false, __ATOMIC_RELAXED);
    struct sigaction own = before_watch;
    own.sa_flags |= SA_SIGINFO;
    own.sa_sigaction = note_interrupt;
    return sigaction(SIGINT, &own, NULL) == 0;
}

static void unwatch_interrupts(void) {
    sigaction(SIGINT, &before_watch, NULL);
    __atomic_store_n(&is_interrupted, false, __ATOMIC_RELAXED);
}

/* -- Runs ----------------------------------------------------------------------------------------------------------- */

/* An interrupt is kept: a thread may have left out a task because of it. */
static int failed_step(korch_handle *h) {
    if (h->watches && __atomic_load_n(&is_interrupted, __ATOMIC_RELAXED))
        __atomic_store_n(&h->failed, KORCH_INTERRUPTED, __ATOMIC_RELAXED);
    return __atomic_load_n(&h->failed, __ATOMIC_RELAXED);
}

static void fail(korch_handle *h, int64_t step) { __atomic_store_n(&h->failed, (int)step + 1, __ATOMIC_RELAXED); }

static void note_wait(korch_hooks *hooks, int64_t since_ns) {
    const korch_handle *const h = (const korch_handle *)hooks;
    const int64_t now_ns = korch_now_ns();
    add_wait(h->watched, now_ns - since_ns, now_ns, h->threads);
}

static void note_arrival(korch_hooks *hooks) {
    korch_handle *const h = (korch_handle *)hooks;
    h->came_ns = korch_now_ns();
    h->stops = failed_step(h) || is_oversubscribed(h->watched, korch_now_ns);
}

/* Record that a step has ended: now, or at `ended_ns`, when all threads had ended it. */
static void note_end(korch_handle *h, const korch_member *own, int64_t i, int64_t ended_ns) {
    if (!h->kernel_ns || own->me != 0) return;
    const int64_t now_ns = ended_ns ? ended_ns : korch_now_ns();
    h->kernel_ns[i] = now_ns - h->start_ns;
    h->start_ns = now_ns;
}

static void run_alone(korch_handle *h, int64_t i) {
    const korch_step *const own = &h->plan->steps.rows[i];
    if (own->run && own->run(h->states[i], h->table + own->first_slot)) fail(h, i);
}

/* Wait, before a task, for other threads' tasks. `first`: the first task of each queue in this segment. */
static void await_tasks(korch_handle *h, const task *row, int64_t me, const int64_t *first) {
    const tables *const plan = h->plan;
    for (int64_t w = row[0].first_wait; w < row[1].first_wait; ++w) {
        const condition *const what = &plan->waits.rows[w];
        korch_count *const count = &h->ended[what->queue];
        const int64_t wanted = first[what->queue] + what->ended;
        if (korch_is_at(count, (uint32_t)wanted)) continue;
        const bool is_told = me == 0 && h->watched;
        const int64_t since_ns = is_told || korch_traces ? korch_now_ns() : 0;
        korch_wait_for(count, (uint32_t)wanted, korch_look_ns(h->threads));
        if (is_told) note_wait(&h->hooks, since_ns);
        if (korch_traces == 2) korch_trace_task(1, me, wanted - 1, NULL, since_ns);
    }
}

/* Run a segment as tasks; return the step after it. A thread runs the tasks of its queue in order. If the run ends early,
 * threads count their remaining tasks without running them, so that no thread waits forever. */
static int64_t run_tasks(korch_handle *h, const korch_member *own, int64_t number) {
    const tables *const plan = h->plan;
    const int64_t *const first = plan->first_tasks.rows + number * plan->queues;
    void *const *const table = table_of(h, own->me);
    korch_count *const ended = &h->ended[own->me];
    for (int64_t i = first[own->me]; i < first[own->me + 1]; ++i) {
        const task *const row = &plan->tasks.rows[i];
        await_tasks(h, row, own->me, first);
        const korch_step *const what = &plan->steps.rows[row->step];
        const int64_t since_ns = korch_traces ? korch_now_ns() : 0;
        if (failed_step(h)) /* count it only */;
        else if (row->stage < 0) {
            if (what->run(h->states[row->step], table + what->first_slot)) fail(h, row->step);
        } else if (row->begin < row->end) {
            what->tasks((int)row->stage, table + what->first_slot, row->begin, row->end, own->me);
        }
        if (korch_traces == 2) korch_trace_task(0, own->me, i, &row->step, since_ns);
        korch_set(ended, (uint32_t)i + 1);
    }
    return plan->segments.rows[number].end;
}

static int64_t run_team(korch_handle *h, korch_member *own, int64_t i) {
    const korch_step *const what = &h->plan->steps.rows[i];
    if (korch_traces) korch_trace_work(-1 - i, own->me, true);
    if (what->team(table_of(h, own->me) + what->first_slot, own)) fail(h, i);
    if (korch_traces) korch_trace_work(-1 - i, own->me, false);
    return i + 1;
}

/* A barrier. Return whether to run more steps. If the others stop, the first thread runs the remaining steps. */
static bool meet_others(korch_handle *h, korch_member *own) {
    if (own->threads == 1) return !failed_step(h);
    own->meet(own);
    if (!h->stops) return true;
    if (own->me != 0) return false;
    own->threads = 1;
    return !failed_step(h);
}

/* Run steps as one of the threads, until a step fails. */
static int run_steps(void *given, korch_member *own) {
    korch_handle *const h = given;
    const tables *const plan = h->plan;
    int64_t next = 0;   /* the next segment */
    bool is_met = true; /* whether there was a barrier since the first thread ran a step alone */
    for (int64_t i = h->from; i < h->end;) {
        while (next < plan->segments.count && plan->segments.rows[next].begin < i) ++next;
        const bool has_tasks = !h->kernel_ns && own->threads == plan->queues && own->threads > 1 &&
                               next < plan->segments.count && plan->segments.rows[next].begin == i;
        if (has_tasks || plan->steps.rows[i].team) {
            if (!is_met && !meet_others(h, own)) return 0;
            const int64_t after = has_tasks ? run_tasks(h, own, next) : run_team(h, own, i);
            if (!meet_others(h, own)) return 0;
            is_met = true;
            if (!has_tasks) note_end(h, own, i, own->threads > 1 ? h->came_ns : 0);
            i = after;
        } else {
            if (own->me == 0) run_alone(h, i);
            if (own->threads == 1 && failed_step(h)) return 0;
            is_met = false;
            note_end(h, own, i++, 0);
        }
    }
    if (!is_met) meet_others(h, own);
    return 0;
}

/* Run a step that may have threads of its own, or that would be alone in a region. If other processes need the cores, it
 * runs on one thread, and so do the libraries that it calls. */
static void run_apart(korch_handle *h) {
    const int64_t i = h->from, since_ns = h->watched ? korch_now_ns() : 0;
    korch_member own = {.threads = 1};
    if (is_oversubscribed(h->watched, korch_now_ns)) {
        korch_set_threads(1);
        run_steps(h, &own);
        korch_set_threads((int)h->threads);
        return;
    }
    run_alone(h, i);
    note_end(h, &own, i, 0);
    const int64_t now_ns = h->watched ? korch_now_ns() : 0;
    if (h->watched) note_step(h->watched, now_ns - since_ns, now_ns, &h->usual_ns[i], h->threads);
}

/* Run steps in one region, or on this thread if other processes need the cores, or one step apart. Before that, no other thread
 * runs steps of this handle. */
static int run_some(korch_handle *h) {
    const korch_step *const first = &h->plan->steps.rows[h->from];
    for (int64_t q = 0; q < h->plan->queues; ++q) __atomic_store_n(&h->ended[q].value, 0, __ATOMIC_RELAXED);
    if (first->is_alone || (h->end == h->from + 1 && first->team && h->threads > 1)) run_apart(h);
    else korch_parallel(is_oversubscribed(h->watched, korch_now_ns) ? 1 : h->threads, run_steps, h, &h->hooks);
    return failed_step(h);
}

int korch_run_timed(korch_handle *h, const void *const *inputs, void *const *outputs, int64_t *kernel_ns) {
    pthread_mutex_lock(&h->mutex);
    const int threads = korch_set_threads((int)h->threads);
    h->watches =
        korch_catches_interrupts && (h->took_ns == 0 || h->took_ns > LONG_RUN_NS) && watch_interrupts();
    bind_tensors(h, inputs, outputs);
    const int64_t begun_ns = h->start_ns = korch_now_ns();
    const korch_steps steps = h->plan->steps;
    int failed = h->failed = 0;
    if (korch_traces) korch_trace_begun(begun_ns);
    h->kernel_ns = kernel_ns;
    h->watched = kernel_ns || h->threads == 1 ? NULL : &h->oversubscription; /* timed runs always use all threads */
    h->hooks = (korch_hooks){h->watched ? note_wait : NULL, note_arrival};
    if (h->watched) begin_oversubscription(h->watched, begun_ns);
    for (h->from = 0; h->from < steps.count && !failed; h->from = h->end) {
        for (h->end = h->from + 1; h->end < steps.count && !steps.rows[h->from].is_alone && !steps.rows[h->end].is_alone;)
            ++h->end;
        failed = run_some(h);
    }
    if (h->watched && !failed) end_oversubscription(h->watched, korch_now_ns());
    if (!failed) copy_outputs(h, inputs, outputs);
    h->took_ns = korch_now_ns() - begun_ns;
    if (h->watches) unwatch_interrupts();
    korch_set_threads(threads);
    pthread_mutex_unlock(&h->mutex);
    return failed;
}

void korch_destroy_states(korch_steps steps, void **states) {
    for (int64_t i = steps.count; states && i-- > 0;)
        if (states[i]) steps.rows[i].destroy(states[i]);
    free(states);
}

void **korch_create_states(korch_steps steps, int threads, char *error, size_t error_size, int64_t *failed) {
    void **const states = calloc((size_t)steps.count + 1, sizeof(void *));
    for (*failed = 0; states && *failed < steps.count; ++*failed) {
        const korch_step *const own = &steps.rows[*failed];
        if (!own->create || (states[*failed] = own->create(threads, error, error_size))) continue;
        korch_destroy_states(steps, states);
        return NULL;
    }
    return states;
}

/* -- The C interface ------------------------------------------------------------------------------------------------ */

KORCH_API int korch_catches_interrupts = 0;

KORCH_API int korch_abi_version(void) { return KORCH_ABI_VERSION; }

KORCH_API void korch_destroy(korch_handle *h) {
    if (!h) return;
    pthread_mutex_lock(&handles_mutex);
    for (korch_handle **at = &handles; *at; at = &(*at)->next) {
        if (*at != h) continue;
        *at = h->next;
        break;
    }
    pthread_mutex_unlock(&handles_mutex);
    korch_destroy_states(h->plan->steps, h->states);
    korch_release(h->arena);
    free(h->table);
    free(h->usual_ns);
    korch_release(h->ended);
    pthread_mutex_destroy(&h->mutex);
    free(h);
}

KORCH_API korch_handle *korch_create(const korch_plan *given, const void *const *constants, int threads, char *error,
                                     size_t error_size) {
    const tables *const plan = (const tables *)given;
    if (threads == 0) threads = (int)plan->queues;
    if (threads < 1 || threads > KORCH_MOST_THREADS) {
        snprintf(error, error_size, "it is for %d threads; expected 1 to %d", threads, KORCH_MOST_THREADS);
        return NULL;
    }
    korch_handle *const h = calloc(1, sizeof *h);
    if (!h) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    h->plan = plan;
    h->constants = constants;
    pthread_mutex_init(&h->mutex, NULL);
    h->threads = threads;
    h->arena = korch_allocate(plan->arena_bytes);
    h->table = calloc((size_t)threads * (size_t)plan->slots.count + 1, sizeof(void *));
    h->usual_ns = calloc((size_t)plan->steps.count + 1, sizeof(int64_t));
    h->ended = korch_allocate(plan->queues * (int64_t)sizeof(korch_count)); /* all 0 */
    if (!h->arena || !h->table || !h->usual_ns || !h->ended) {
        snprintf(error, error_size, "out of memory: the arena needs %lld bytes", (long long)plan->arena_bytes);
        korch_destroy(h);
        return NULL;
    }
    for (int64_t t = 0; t < threads; ++t)
        for (int64_t i = 0; i < plan->slots.count; ++i) {
            const slot *const own = &plan->slots.rows[i];
            if (own->place < INPUT) table_of(h, t)[i] = locate(h, own, t, NULL, NULL);
        }
    const int before = korch_set_threads(threads);
    char text[512] = "";
    int64_t failed;
    h->states = korch_create_states(plan->steps, threads, text, sizeof text, &failed);
    korch_set_threads(before);
    if (!h->states) {
        text[sizeof text - 1] = 0;
        snprintf(error, error_size, "kernel %s: %s", plan->symbols.rows[failed],
                 text[0] ? text : "its create function gave no reason");
        korch_destroy(h);
        return NULL;
    }
    pthread_mutex_lock(&handles_mutex);
    h->next = handles;
    handles = h;
    pthread_mutex_unlock(&handles_mutex);
    return h;
}

int korch_run(korch_handle *h, const void *const *inputs, void *const *outputs) {
    return korch_run_timed(h, inputs, outputs, NULL);
}
