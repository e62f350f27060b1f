/* Runs plans: walks the tables that `korch.runtime.source` prints. */
#include "korch_oversubscription.h"
#include "korch_runtime.h"

#include <pthread.h>
#include <sys/mman.h>

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
    const tables *plan;
    pthread_mutex_t mutex;
    korch_handle *next; /* in the list of all handles */
    int64_t threads;
    oversubscription oversubscription;
    char *arena;
    const void *const *constants;
    void **table; /* the buffers of all steps, for each thread */
    void **states;
    korch_count *ended; /* for each queue: the number of the task after the one that has ended last; 0 before the first */
    int64_t *usual_ns;  /* the usual time of each step that runs apart; see note_step */
    int64_t took_ns;    /* the time of the last run; 0 before the first */
    int64_t start_ns;   /* in timed runs: when the next kernel begins */
};

static pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;
static korch_handle *handles;

void korch_hold_handles(bool holds) {
    if (holds) pthread_mutex_lock(&handles_mutex);
    for (korch_handle *h = handles; h; h = h->next) (holds ? pthread_mutex_lock : pthread_mutex_unlock)(&h->mutex);
    if (!holds) pthread_mutex_unlock(&handles_mutex);
}

void *korch_allocate(int64_t size) {
    void *memory = NULL;
    const size_t alignment = size >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    const size_t whole = ((size_t)(size > 0 ? size : 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (posix_memalign(&memory, alignment, whole)) return NULL;
    if (alignment == HUGE_PAGE) madvise(memory, whole, MADV_HUGEPAGE);
    memset(memory, 0, whole);
    return memory;
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

/* -- Runs ----------------------------------------------------------------------------------------------------------- */

/* Consecutive steps that threads run. Between two steps, the first thread decides whether the others stop. */
typedef struct {
    korch_hooks hooks;
    korch_handle *h;
    oversubscription *oversubscription;       /* null: none is detected */
    int64_t from, end;  /* the steps */
    int failed;         /* atomic: 1 + the number of a step that failed, or 0 */
    bool stops;
    int64_t came_ns;    /* when all threads had arrived at the last barrier */
    int64_t *kernel_ns; /* null unless the run is timed */
} crew;

static int failed_step(const crew *crew) {
    return korch_interrupted() ? KORCH_INTERRUPTED : __atomic_load_n(&crew->failed, __ATOMIC_RELAXED);
}

static void fail(crew *crew, int64_t step) { __atomic_store_n(&crew->failed, (int)step + 1, __ATOMIC_RELAXED); }

static void note_wait(korch_hooks *hooks, int64_t since_ns) {
    const crew *const own = (const crew *)hooks;
    const int64_t now_ns = korch_now_ns();
    add_wait(own->oversubscription, now_ns - since_ns, now_ns, own->h->threads);
}

static void note_arrival(korch_hooks *hooks) {
    crew *const own = (crew *)hooks;
    own->came_ns = korch_now_ns();
    own->stops = failed_step(own) || is_oversubscribed(own->oversubscription, korch_now_ns);
}

/* Record that a step has ended: now, or at `ended_ns`, when all threads had ended it. */
static void note_end(const crew *crew, const korch_member *own, int64_t i, int64_t ended_ns) {
    if (!crew->kernel_ns || own->me != 0) return;
    const int64_t now_ns = ended_ns ? ended_ns : korch_now_ns();
    crew->kernel_ns[i] = now_ns - crew->h->start_ns;
    crew->h->start_ns = now_ns;
}

static void run_alone(crew *crew, int64_t i) {
    const korch_step *const own = &crew->h->plan->steps.rows[i];
    if (own->run && own->run(crew->h->states[i], crew->h->table + own->first_slot)) fail(crew, i);
}

/* Wait, before a task, for other threads' tasks. `first`: the first task of each queue in this segment. */
static void await_tasks(crew *crew, const task *row, int64_t me, const int64_t *first) {
    const tables *const plan = crew->h->plan;
    for (int64_t w = row[0].first_wait; w < row[1].first_wait; ++w) {
        const condition *const what = &plan->waits.rows[w];
        korch_count *const count = &crew->h->ended[what->queue];
        const int64_t wanted = first[what->queue] + what->ended;
        if (korch_is_at(count, (uint32_t)wanted)) continue;
        const bool is_told = me == 0 && crew->oversubscription;
        const int64_t since_ns = is_told || korch_traces ? korch_now_ns() : 0;
        korch_wait_for(count, (uint32_t)wanted, korch_look_ns(crew->h->threads));
        if (is_told) note_wait(&crew->hooks, since_ns);
        if (korch_traces == 2) korch_trace_task(1, me, wanted - 1, NULL, since_ns);
    }
}

/* Run a segment as tasks; return the step after it. A thread runs the tasks of its queue in order. If the run ends early,
 * threads count their remaining tasks without running them, so that no thread waits forever. */
static int64_t run_tasks(crew *crew, const korch_member *own, int64_t number) {
    const tables *const plan = crew->h->plan;
    const int64_t *const first = plan->first_tasks.rows + number * plan->queues;
    void *const *const table = table_of(crew->h, own->me);
    korch_count *const ended = &crew->h->ended[own->me];
    for (int64_t i = first[own->me]; i < first[own->me + 1]; ++i) {
        const task *const row = &plan->tasks.rows[i];
        await_tasks(crew, row, own->me, first);
        const korch_step *const what = &plan->steps.rows[row->step];
        const int64_t since_ns = korch_traces ? korch_now_ns() : 0;
        if (failed_step(crew)) /* count it only */;
        else if (row->stage < 0) {
            if (what->run(crew->h->states[row->step], table + what->first_slot)) fail(crew, row->step);
        } else if (row->begin < row->end) {
            what->tasks((int)row->stage, table + what->first_slot, row->begin, row->end, own->me);
        }
        if (korch_traces == 2) korch_trace_task(0, own->me, i, &row->step, since_ns);
        korch_set(ended, (uint32_t)i + 1);
    }
    return plan->segments.rows[number].end;
}

static int64_t run_team(crew *crew, korch_member *own, int64_t i) {
    const korch_step *const what = &crew->h->plan->steps.rows[i];
    if (korch_traces) korch_trace_work(-1 - i, own->me, true);
    if (what->team(table_of(crew->h, own->me) + what->first_slot, own)) fail(crew, i);
    if (korch_traces) korch_trace_work(-1 - i, own->me, false);
    return i + 1;
}

/* A barrier. Return whether to run more steps. If the others stop, the first thread runs the remaining steps. */
static bool meet_crew(crew *crew, korch_member *own) {
    if (own->threads == 1) return !failed_step(crew);
    own->meet(own);
    if (!crew->stops) return true;
    if (own->me != 0) return false;
    own->threads = 1;
    return !failed_step(crew);
}

/* Run the steps of a crew as one of its threads, until a step fails. */
static int run_steps(void *given, korch_member *own) {
    crew *const crew = given;
    korch_handle *const h = crew->h;
    const tables *const plan = h->plan;
    int64_t next = 0;   /* the next segment */
    bool is_met = true; /* whether there was a barrier since the first thread ran a step alone */
    for (int64_t i = crew->from; i < crew->end;) {
        while (next < plan->segments.count && plan->segments.rows[next].begin < i) ++next;
        const bool has_tasks = !crew->kernel_ns && own->threads == plan->queues && own->threads > 1 &&
                               next < plan->segments.count && plan->segments.rows[next].begin == i;
        if (has_tasks || plan->steps.rows[i].team) {
            if (!is_met && !meet_crew(crew, own)) return 0;
            const int64_t after = has_tasks ? run_tasks(crew, own, next) : run_team(crew, own, i);
            if (!meet_crew(crew, own)) return 0;
            is_met = true;
            if (!has_tasks) note_end(crew, own, i, own->threads > 1 ? crew->came_ns : 0);
            i = after;
        } else {
            if (own->me == 0) run_alone(crew, i);
            if (own->threads == 1 && failed_step(crew)) return 0;
            is_met = false;
            note_end(crew, own, i++, 0);
        }
    }
    if (!is_met) meet_crew(crew, own);
    return 0;
}

/* Run steps in one region, or on this thread if other processes need the cores. */
static void run_together(crew *crew) {
    korch_parallel(is_oversubscribed(crew->oversubscription, korch_now_ns) ? 1 : crew->h->threads, run_steps, crew, &crew->hooks);
}

/* Run a step that may have threads of its own, or that would be alone in a region. If other processes need the cores, it
 * runs on one thread, and so do the libraries that it calls. */
static void run_apart(crew *crew, int64_t i) {
    korch_handle *const h = crew->h;
    const int64_t since_ns = crew->oversubscription ? korch_now_ns() : 0;
    korch_member own = {.threads = 1};
    if (is_oversubscribed(crew->oversubscription, korch_now_ns)) {
        korch_set_threads(1);
        run_steps(crew, &own);
        korch_set_threads((int)h->threads);
        return;
    }
    run_alone(crew, i);
    note_end(crew, &own, i, 0);
    const int64_t now_ns = crew->oversubscription ? korch_now_ns() : 0;
    if (crew->oversubscription) note_step(crew->oversubscription, now_ns - since_ns, now_ns, &h->usual_ns[i], h->threads);
}

/* Run the steps of a crew, before which no other thread is in a region of this handle. */
static int run_crew(crew *crew) {
    const korch_step *const first = &crew->h->plan->steps.rows[crew->from];
    for (int64_t q = 0; q < crew->h->plan->queues; ++q) __atomic_store_n(&crew->h->ended[q].value, 0, __ATOMIC_RELAXED);
    const bool is_one = crew->end == crew->from + 1 && first->team && crew->h->threads > 1;
    if (first->is_alone || is_one) run_apart(crew, crew->from);
    else run_together(crew);
    return failed_step(crew);
}

int korch_run_timed(korch_handle *h, const void *const *inputs, void *const *outputs, int64_t *kernel_ns) {
    pthread_mutex_lock(&h->mutex);
    const int threads = korch_set_threads((int)h->threads);
    const bool watches =
        korch_catches_interrupts && (h->took_ns == 0 || h->took_ns > LONG_RUN_NS) && korch_watch_interrupts();
    bind_tensors(h, inputs, outputs);
    const int64_t begun_ns = h->start_ns = korch_now_ns();
    const korch_steps steps = h->plan->steps;
    int failed = 0;
    if (korch_traces) korch_trace_begun(begun_ns);
    /* Timed runs always use all threads. */
    oversubscription *const oversubscription = kernel_ns || h->threads == 1 ? NULL : &h->oversubscription;
    if (oversubscription) begin_oversubscription(oversubscription, begun_ns);
    const korch_hooks hooks = {oversubscription ? note_wait : NULL, note_arrival};
    for (int64_t from = 0, end; from < steps.count && !failed; from = end) {
        for (end = from + 1; end < steps.count && !steps.rows[from].is_alone && !steps.rows[end].is_alone;) ++end;
        failed = run_crew(&(crew){hooks, h, oversubscription, from, end, .kernel_ns = kernel_ns});
    }
    if (oversubscription && !failed) end_oversubscription(oversubscription, korch_now_ns());
    if (!failed) copy_outputs(h, inputs, outputs);
    h->took_ns = korch_now_ns() - begun_ns;
    if (watches) korch_unwatch_interrupts();
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
    free(h->arena);
    free(h->table);
    free(h->usual_ns);
    free(h->ended);
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
