/* Runs a plan: what lies between the generated tables of a plan and the C interface.
 *
 * The main source of a library has, before this text, the tables in namespace `plan`:
 *
 *     INPUTS, OUTPUTS, CONSTANTS  korch_tensor[]
 *     STEPS, SYMBOLS              step[] and const char *[]: one kernel call each, and its name
 *     SLOTS                       slot[]: the buffers of all steps, one step after the other
 *     BINDINGS                    int64_t[]: the slots whose pointers differ from run to run
 *     COPIES                      copy[]: model outputs that no kernel writes in place
 *     SEGMENTS, FIRST_TASKS       segment[], int64_t[]: steps that run as tasks, and where each queue begins
 *     TASKS, WAITS                task[], wait[]: those of all queues, one queue after the other
 *     QUEUES                      int: the threads that the queues are for, at least 1
 *     INPUT_COUNT, ...            int64_t: the length of each table, which ends in an empty row
 *     ARENA_BYTES                 int64_t
 *
 * A handle holds the pointers of all slots in one table. Those to the arena and the constants are
 * set once; those to model inputs and outputs at the start of each run.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);
extern "C" int omp_pause_resource_all(int) __attribute__((weak)); /* new in GCC 9 */
extern "C" void __kmpc_fork_call(void) __attribute__((weak));     /* of Intel's and Clang's OpenMP */

namespace {

constexpr size_t ALIGNMENT = 64;
constexpr size_t HUGE_PAGE = 2u << 20;

/* OpenMP keeps a record for each thread on the stack: many more would overflow it. */
constexpr int MOST_THREADS = 1024;

struct handle {
    pthread_mutex_t mutex;
    handle *next; /* in the list of all */
    int threads;
    korch_teams::Oversubscription oversubscription;
    char *arena;
    const void **constants;
    void **table;
    void **states;
    korch_teams::Count *ended; /* of each thread: how many tasks it has run */
    int64_t *usual_ns; /* of the steps from this one on that run in turn; see Oversubscription::note_step */
};

/* A new team costs more than a small model, so the count is touched only if it differs. */
struct thread_count {
    int before;
    explicit thread_count(int threads) : before(omp_get_max_threads()) {
        if (before != threads) omp_set_num_threads(threads);
        else before = 0;
    }
    ~thread_count() {
        if (before) omp_set_num_threads(before);
    }
};

/* fork() copies only the thread that calls it. A child would wait for ever for OpenMP's other
 * threads, and for a run that another thread had begun. So before a fork all runs end, and the
 * calling thread's OpenMP threads, too: parent and child each start new ones with their next run. */
pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;
handle *handles = nullptr;

void before_fork(void) {
    constexpr int hard = 2; /* omp_pause_hard */
    pthread_mutex_lock(&handles_mutex);
    for (handle *h = handles; h; h = h->next) pthread_mutex_lock(&h->mutex);
    const bool ends_itself = __kmpc_fork_call != nullptr;
    if (omp_pause_resource_all && !ends_itself) omp_pause_resource_all(hard);
}

void after_fork(void) {
    for (handle *h = handles; h; h = h->next) pthread_mutex_unlock(&h->mutex);
    pthread_mutex_unlock(&handles_mutex);
}

/* The C library forgets these functions when it unloads this library. */
__attribute__((constructor)) void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, after_fork);
}

void enlist(handle *h) {
    pthread_mutex_lock(&handles_mutex);
    h->next = handles;
    handles = h;
    pthread_mutex_unlock(&handles_mutex);
}

void strike_off(handle *h) {
    pthread_mutex_lock(&handles_mutex);
    for (handle **at = &handles; *at; at = &(*at)->next) {
        if (*at != h) continue;
        *at = h->next;
        break;
    }
    pthread_mutex_unlock(&handles_mutex);
}

size_t round_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

void *allocate(size_t size) {
    void *memory = nullptr;
    const size_t alignment = size >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    size = round_up(size ? size : 1, ALIGNMENT);
    if (posix_memalign(&memory, alignment, size)) return nullptr;
    if (alignment == HUGE_PAGE) madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 0, size);
    return memory;
}

void *locate(const handle *h, const plan::slot &slot) {
    switch (slot.place) {
    case plan::ARENA: return h->arena + slot.at;
    case plan::CONSTANT: return const_cast<void *>(h->constants[slot.at]);
    default: return nullptr;
    }
}

/* Set the pointers that differ from run to run. */
void bind(handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < plan::BINDING_COUNT; ++i) {
        const plan::slot &slot = plan::SLOTS[plan::BINDINGS[i]];
        h->table[plan::BINDINGS[i]] = slot.place == plan::INPUT
                                          ? const_cast<void *>(inputs[slot.at])
                                          : (char *)outputs[slot.at] + slot.offset;
    }
}

void copy_outputs(const handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < plan::COPY_COUNT; ++i) {
        const plan::copy &copy = plan::COPIES[i];
        const void *from = copy.from.place == plan::INPUT     ? inputs[copy.from.at]
                           : copy.from.place == plan::OUTPUT
                               ? (char *)outputs[copy.from.at] + copy.from.offset
                               : locate(h, copy.from);
        const size_t size = (size_t)plan::OUTPUTS[copy.output].size_bytes;
        if (size) memcpy(outputs[copy.output], from, size);
    }
}

using korch_teams::now_ns;

/* Runs steps of a plan, until one fails. */
template <bool IS_TIMED>
struct runner {
    handle *h;
    int64_t *kernel_ns;
    int64_t start = IS_TIMED ? now_ns() : 0;
    korch_teams::Oversubscription *oversubscription = nullptr;
    int64_t segment = 0; /* the next one */
    int failed = 0;      /* the step after that which failed */

    void run(int64_t from, int64_t end) {
        for (int64_t i = from; i < end && !failed;) {
            if (!IS_TIMED && runs_tasks() && plan::SEGMENTS[segment].begin == i) i = run_tasks();
            else run(i++);
        }
    }

    void run(int64_t i) {
        const plan::step &step = plan::STEPS[i];
        if (step.run && step.run(h->states[i], h->table + step.first_slot)) failed = (int)i + 1;
        if (IS_TIMED) {
            const int64_t now = now_ns();
            kernel_ns[i] = now - start;
            start = now;
        }
    }

    bool runs_tasks() const { return segment < plan::SEGMENT_COUNT && h->threads == plan::QUEUES; }

    /* Run the next segment as tasks; return the step after it. */
    int64_t run_tasks() {
        failed = korch_tasks::run_segment(segment, h->table, h->states, h->ended, oversubscription);
        return plan::SEGMENTS[segment++].end;
    }
};

/* Steps that follow each other, before `end`. */
struct stretch {
    int64_t end;
    int regions; /* how many of them open regions of their own */

    /* The longest from a step on whose steps can share a region, or a single step. */
    explicit stretch(int64_t from) : end(from), regions(0) {
        for (; end < plan::STEP_COUNT && !plan::STEPS[end].is_alone; ++end)
            regions += plan::STEPS[end].opens_regions;
        if (end == from) ++end;
    }
};

template <bool IS_TIMED>
int run(handle *h, const void *const *inputs, void *const *outputs, int64_t *kernel_ns) {
    pthread_mutex_lock(&h->mutex);
    const thread_count count(h->threads);
    bind(h, inputs, outputs);
    runner<IS_TIMED> steps{h, kernel_ns};
    /* Times are those of all threads. */
    korch_teams::Oversubscription *oversubscription = IS_TIMED || h->threads == 1 ? nullptr : &h->oversubscription;
    steps.oversubscription = oversubscription;
    if (oversubscription) oversubscription->begin(now_ns());
    for (int64_t from = 0; from < plan::STEP_COUNT && !steps.failed;) {
        const stretch next(from);
        const auto run_it = [&] { steps.run(from, next.end); };
        if (h->threads > 1 && next.regions > 1) {
            korch_teams::run_together(h->threads, oversubscription, run_it);
        } else if (oversubscription && (next.regions || plan::STEPS[from].is_alone)) {
            korch_teams::run_apart(h->threads, *oversubscription, h->usual_ns[from], run_it);
        } else {
            run_it();
        }
        from = next.end;
    }
    if (oversubscription) oversubscription->end(now_ns());
    if (!steps.failed) copy_outputs(h, inputs, outputs);
    pthread_mutex_unlock(&h->mutex);
    return steps.failed;
}

/* Create the state of each kernel; return whether all could be. */
bool create_states(handle *h, char *error, size_t error_size) {
    const thread_count count(h->threads);
    for (int64_t i = 0; i < plan::STEP_COUNT; ++i) {
        const plan::step &step = plan::STEPS[i];
        if (!step.create) continue;
        char text[512] = "";
        h->states[i] = step.create(h->threads, text, sizeof text);
        if (h->states[i]) continue;
        text[sizeof text - 1] = 0;
        snprintf(error, error_size, "kernel %s: %s", plan::SYMBOLS[i],
                 text[0] ? text : "its create function gave no reason");
        return false;
    }
    return true;
}

} // namespace

/* One of several plans of a library has names of its own. */
#ifndef KORCH_PLAN
#define KORCH_PLAN(name) korch_##name
#define KORCH_ONLY_PLAN
#endif

extern "C" {

const korch_tensor *KORCH_PLAN(inputs)(int64_t *count) {
    *count = plan::INPUT_COUNT;
    return plan::INPUTS;
}

const korch_tensor *KORCH_PLAN(outputs)(int64_t *count) {
    *count = plan::OUTPUT_COUNT;
    return plan::OUTPUTS;
}

const korch_tensor *KORCH_PLAN(constants)(int64_t *count) {
    *count = plan::CONSTANT_COUNT;
    return plan::CONSTANTS;
}

const char *const *KORCH_PLAN(kernels)(int64_t *count) {
    *count = plan::STEP_COUNT;
    return plan::SYMBOLS;
}

int64_t KORCH_PLAN(arena_bytes)(void) { return plan::ARENA_BYTES; }

void KORCH_PLAN(destroy)(void *pointer) {
    handle *h = (handle *)pointer;
    if (!h) return;
    strike_off(h);
    for (int64_t i = plan::STEP_COUNT; h->states && i-- > 0;)
        if (h->states[i]) plan::STEPS[i].destroy(h->states[i]);
    free(h->arena);
    free(h->constants);
    free(h->table);
    free(h->states);
    free(h->usual_ns);
    free(h->ended);
    pthread_mutex_destroy(&h->mutex);
    free(h);
}

void *KORCH_PLAN(create)(const void *const *constants, int threads, char *error, size_t error_size) {
    if (threads < 1 || threads > MOST_THREADS) {
        snprintf(error, error_size, "it is for %d threads; expected 1 to %d", threads, MOST_THREADS);
        return nullptr;
    }
    handle *h = (handle *)calloc(1, sizeof(handle));
    if (!h) {
        snprintf(error, error_size, "out of memory");
        return nullptr;
    }
    pthread_mutex_init(&h->mutex, nullptr);
    h->threads = threads;
    h->arena = (char *)allocate(plan::ARENA_BYTES);
    h->constants = (const void **)calloc(plan::CONSTANT_COUNT + 1, sizeof(void *));
    h->table = (void **)calloc(plan::SLOT_COUNT + 1, sizeof(void *));
    h->states = (void **)calloc(plan::STEP_COUNT + 1, sizeof(void *));
    h->usual_ns = (int64_t *)calloc(plan::STEP_COUNT + 1, sizeof(int64_t));
    h->ended = (korch_teams::Count *)allocate(plan::QUEUES * sizeof(korch_teams::Count)); /* all 0 */
    if (!h->arena || !h->constants || !h->table || !h->states || !h->usual_ns || !h->ended) {
        snprintf(error, error_size, "out of memory: the arena needs %lld bytes",
                 (long long)plan::ARENA_BYTES);
        KORCH_PLAN(destroy)(h);
        return nullptr;
    }
    for (int64_t i = 0; i < plan::CONSTANT_COUNT; ++i) h->constants[i] = constants[i];
    for (int64_t i = 0; i < plan::SLOT_COUNT; ++i) h->table[i] = locate(h, plan::SLOTS[i]);
    if (create_states(h, error, error_size)) {
        enlist(h);
        return h;
    }
    KORCH_PLAN(destroy)(h);
    return nullptr;
}

int KORCH_PLAN(run)(void *h, const void *const *inputs, void *const *outputs) {
    return run<false>((handle *)h, inputs, outputs, nullptr);
}

int KORCH_PLAN(run_timed)(void *h, const void *const *inputs, void *const *outputs,
                    int64_t *kernel_ns) {
    return run<true>((handle *)h, inputs, outputs, kernel_ns);
}

#ifdef KORCH_ONLY_PLAN
int korch_abi_version(void) { return KORCH_ABI_VERSION; }

const korch_plan *korch_plans(int64_t *count) {
    static const korch_plan only = {
        korch_inputs, korch_outputs, korch_constants, korch_kernels, korch_arena_bytes,
        korch_create, korch_run,     korch_run_timed, korch_destroy,
    };
    *count = 1;
    return &only;
}
#endif

} // extern "C"
