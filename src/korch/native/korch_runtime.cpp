/* Runs plans: implements the C interface on top of the tables of each plan (`korch_plan.h`). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "korch_interrupts.h"
#include "korch_oversubscription.h"
#include "korch_plan.h"
#include "korch_tasks.h"

extern "C" void omp_set_num_threads(int);
extern "C" int omp_pause_resource_all(int) __attribute__((weak)); /* new in GCC 9 */
extern "C" void __kmpc_fork_call(void) __attribute__((weak));     /* of Intel's and Clang's OpenMP */

/* `korch_threads.cpp` defines these if it is preloaded: a thread begins or ends its work on a step; OpenMP regions that
 * the thread opens no longer belong to a kernel, or do so again. */
extern "C" void korch_threads_work(int64_t step, int begins) __attribute__((weak));
extern "C" void korch_threads_hide(int begins) __attribute__((weak));

namespace {

constexpr size_t ALIGNMENT = 64;
constexpr size_t HUGE_PAGE = 2u << 20;

/* Runs that take longer than this can be interrupted: a user would not wait for their end. */
constexpr int64_t LONG_RUN_NS = 20000000;

/* OpenMP keeps a record for each thread on the stack: many more threads would overflow it. */
constexpr int MOST_THREADS = 1024;

struct handle {
    const korch_plan *plan;
    pthread_mutex_t mutex;
    handle *next; /* in the list of all handles */
    int threads;
    korch::Oversubscription oversubscription;
    char *arena;
    const void **constants;
    void **table; /* the tables of all threads */
    void **states;
    korch::Count *met;   /* for each thread: how many barriers it has reached */
    korch::Count *ended; /* for each queue: how many of its tasks have run */
    uint32_t *before;    /* for each thread, and for a crew: how many had run before, for each queue */
    int64_t *usual_ns; /* the usual time of each step that runs apart; see Oversubscription::note_step */

    int64_t took_ns;   /* the time of the last run; 0 before the first */

    void **table_of(long thread) const { return table + thread * plan->slots.count; }
    uint32_t *before_of(long thread) const { return before + thread * plan->queues; }
};

/* Sets OpenMP's thread count for a scope. Creating a new team takes longer than running a small model, so the count is
 * only set if it differs. */
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

/* fork() copies only the thread that calls it. A child would wait forever for OpenMP's other threads, and for
 * a run that another thread had begun. So before a fork, all runs are completed and the calling thread's OpenMP
 * threads are ended; parent and child each start new ones with their next run. */
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

/* The C library unregisters these functions when this library is unloaded. */
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

void *locate(const handle *h, const plan::slot &slot, int thread = 0) {
    switch (slot.place) {
    case plan::ARENA: return h->arena + slot.at + thread * slot.offset;
    case plan::CONSTANT: return const_cast<void *>(h->constants[slot.at]);
    default: return nullptr;
    }
}

/* Set the pointers and numbers that differ from run to run. */
void bind(handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < h->plan->bindings.count; ++i) {
        const int64_t binding = h->plan->bindings[i];
        const plan::slot &slot = h->plan->slots[binding];
        void *const at = slot.place == plan::INPUT ? const_cast<void *>(inputs[slot.at])
                                                   : (char *)outputs[slot.at] + slot.offset;
        for (int t = 0; t < h->threads; ++t) h->table_of(t)[binding] = at;
    }
}

void copy_outputs(const handle *h, const void *const *inputs, void *const *outputs) {
    for (int64_t i = 0; i < h->plan->copies.count; ++i) {
        const plan::copy &copy = h->plan->copies[i];
        const void *from = copy.from.place == plan::INPUT     ? inputs[copy.from.at]
                           : copy.from.place == plan::OUTPUT
                               ? (char *)outputs[copy.from.at] + copy.from.offset
                               : locate(h, copy.from);
        const size_t size = (size_t)h->plan->outputs[copy.output].size_bytes;
        if (size) memcpy(outputs[copy.output], from, size);
    }
}

using korch::now_ns;

/* The threads that run steps of a plan. Between two steps, the first thread decides whether the others stop. */
struct crew : korch::Team {
    korch::Oversubscription *oversubscription; /* null: none is detected */
    int failed = 0;                            /* atomic: 1 + the number of a step that failed, or 0 */
    bool stops = false;
    int64_t came_ns = 0; /* when all threads had arrived at the last barrier */
    korch::Count finished;

    crew(handle *h, korch::Oversubscription *found) : Team{h->met, h->threads, korch::look_ns(h->threads)}, oversubscription(found) {
        for (int64_t q = 0; q < h->plan->queues; ++q) h->before_of(h->threads)[q] = h->ended[q].now();
        waited = [](Team &team, int64_t since_ns) {
            crew &own = static_cast<crew &>(team);
            if (own.oversubscription) own.oversubscription->note_wait(since_ns, now_ns(), (int)own.threads);
        };
        all_came = [](Team &team) {
            crew &own = static_cast<crew &>(team);
            own.came_ns = now_ns();
            own.stops = own.failed_step() || (own.oversubscription && own.oversubscription->is_here());
        };
        ends = [](Team &team) { return static_cast<crew &>(team).failed_step() != 0; };
    }

    int failed_step() const { return korch::Interrupts::came() ? KORCH_INTERRUPTED : __atomic_load_n(&failed, __ATOMIC_RELAXED); }
    void fail(int step) { __atomic_store_n(&failed, step, __ATOMIC_RELAXED); }
};

/* Runs steps of a plan as one of the threads of a crew, until a step fails. */
template <bool IS_TIMED>
struct runner {
    handle *h;
    crew &team;
    korch::Member own;
    int64_t *kernel_ns;
    int64_t *start; /* in timed runs: when the next kernel begins */

    void run(int64_t from, int64_t end) {
        const korch_plan &plan = *h->plan;
        memcpy(h->before_of(own.me), h->before_of(h->threads), plan.queues * sizeof(uint32_t));
        int64_t segment = 0; /* the next segment */
        bool is_met = true;  /* whether there was a barrier since the first thread ran a step alone */
        for (int64_t i = from; i < end;) {
            while (segment < plan.segments.count && plan.segments[segment].begin < i) ++segment;
            const bool has_tasks = !IS_TIMED && own.threads == plan.queues && own.threads > 1 &&
                                   segment < plan.segments.count && plan.segments[segment].begin == i;
            if (has_tasks || plan.steps[i].team) {
                if (!is_met && !meet()) return;
                const int64_t next = has_tasks ? run_tasks(segment) : run_team(i);
                if (!meet()) return;
                is_met = true;
                if (!has_tasks) note(i, own.threads > 1 ? team.came_ns : 0);
                i = next;
            } else {
                if (own.me == 0) run_alone(i);
                if (own.threads == 1 && team.failed_step()) return;
                is_met = false;
                note(i++);
            }
        }
        if (!is_met) meet();
    }

    /* A barrier. Return whether to run more steps. If the others stop, the first thread runs the remaining steps. */
    bool meet() {
        if (own.threads == 1) return !team.failed_step();
        own.meet();
        if (!team.stops) return true;
        if (own.me == 0) {
            own.threads = 1;
            return !team.failed_step();
        }
        team.finished.wait_for(1, team.look_ns);
        return false;
    }

    int64_t run_team(int64_t i) {
        const plan::step &step = h->plan->steps[i];
        if (korch_threads_work) korch_threads_work(i, true);
        if (step.team(h->table_of(own.me) + step.first_slot, own)) team.fail((int)i + 1);
        if (korch_threads_work) korch_threads_work(i, false);
        return i + 1;
    }

    void run_alone(int64_t i) {
        const plan::step &step = h->plan->steps[i];
        if (step.run && step.run(h->states[i], h->table + step.first_slot)) team.fail((int)i + 1);
    }

    /* Run a segment as tasks; return the step after it. */
    int64_t run_tasks(int64_t segment) {
        const korch_plan &plan = *h->plan;
        uint32_t *const before = h->before_of(own.me);
        const int failed =
            korch_tasks::run_queue(plan, segment, (int)own.me, h->table_of(own.me), h->states, h->ended, before, team);
        if (failed) team.fail(failed);
        const int64_t *const first = plan.first_tasks.rows + segment * plan.queues;
        for (int64_t q = 0; q < plan.queues; ++q) before[q] += (uint32_t)(first[q + 1] - first[q]);
        return plan.segments[segment].end;
    }

    /* Record that a step has ended: now, or at `ended_ns`, when all threads had ended it. */
    void note(int64_t i, int64_t ended_ns = 0) {
        if (!IS_TIMED || own.me != 0) return;
        const int64_t now = ended_ns ? ended_ns : now_ns();
        kernel_ns[i] = now - *start;
        *start = now;
    }
};

/* Consecutive steps, up to but not including `end`. */
struct stretch {
    int64_t end;
    int regions; /* how many of the steps run on all threads */

    /* The longest stretch from a step on whose steps can share a region, or a single step. */
    stretch(const korch_plan &plan, int64_t from) : end(from), regions(0) {
        for (; end < plan.steps.count && !plan.steps[end].is_alone; ++end) regions += plan.steps[end].team != nullptr;
        if (end == from) ++end;
    }
};

/* Run steps in one region. */
template <bool IS_TIMED>
int run_together(handle *h, const stretch &steps, int64_t from, korch::Oversubscription *oversubscription,
                 int64_t *kernel_ns, int64_t *start) {
    crew team(h, oversubscription);
    if (h->threads == 1 || (oversubscription && oversubscription->is_here())) {
        runner<IS_TIMED>{h, team, {}, kernel_ns, start}.run(from, steps.end);
        return team.failed_step();
    }
    if (korch_threads_hide) korch_threads_hide(true);
    const uint32_t turn = korch::begin_turns(team);
    int64_t ended_ns = 0;
    const korch::Leader leader(h->threads);
#pragma omp parallel num_threads(h->threads)
    {
        const int me = omp_get_thread_num(), threads = omp_get_num_threads();
        if (me == 0) team.threads = threads; /* read by this thread only */
        else leader.leave_core(me);
        runner<IS_TIMED>{h, team, korch::member(team, me, threads, turn), kernel_ns, start}.run(from, steps.end);
        if (me == 0) {
            team.finished.set(1);
            if (oversubscription) ended_ns = now_ns();
        }
    }
    if (oversubscription) oversubscription->note_wait(ended_ns, now_ns(), h->threads);
    if (korch_threads_hide) korch_threads_hide(false);
    return team.failed_step();
}

/* Run a step that may have threads of its own, or that would be alone in a region. If other processes need the cores, it
 * runs on one thread: OpenMP then reports one thread to libraries. */
template <bool IS_TIMED>
int run_apart(handle *h, int64_t i, korch::Oversubscription *oversubscription, int64_t *kernel_ns, int64_t *start) {
    crew team(h, nullptr);
    runner<IS_TIMED> steps{h, team, {}, kernel_ns, start};
    if (oversubscription && oversubscription->is_here()) {
        const korch::OneThread one;
        steps.run(i, i + 1);
        return team.failed_step();
    }
    const int64_t since_ns = oversubscription ? now_ns() : 0;
    steps.run_alone(i);
    steps.note(i);
    if (oversubscription) oversubscription->note_step(since_ns, now_ns(), h->usual_ns[i], h->threads);
    return team.failed_step();
}

template <bool IS_TIMED>
int run(handle *h, const void *const *inputs, void *const *outputs, int64_t *kernel_ns) {
    pthread_mutex_lock(&h->mutex);
    const thread_count count(h->threads);
    const korch::Interrupts watch(korch_catches_interrupts && (h->took_ns == 0 || h->took_ns > LONG_RUN_NS));
    bind(h, inputs, outputs);
    int64_t start = now_ns();
    const int64_t begun_ns = start;
    int failed = 0;
    /* Timed runs always use all threads. */
    korch::Oversubscription *oversubscription = IS_TIMED || h->threads == 1 ? nullptr : &h->oversubscription;
    if (oversubscription) oversubscription->begin(start);
    for (int64_t from = 0; from < h->plan->steps.count && !failed;) {
        const stretch next(*h->plan, from);
        const bool is_apart = h->plan->steps[from].is_alone || (next.end == from + 1 && next.regions && h->threads > 1);
        failed = is_apart ? run_apart<IS_TIMED>(h, from, oversubscription, kernel_ns, &start)
                          : run_together<IS_TIMED>(h, next, from, oversubscription, kernel_ns, &start);
        from = next.end;
    }
    if (oversubscription && !failed) oversubscription->end(now_ns());
    if (!failed) copy_outputs(h, inputs, outputs);
    h->took_ns = now_ns() - begun_ns;
    pthread_mutex_unlock(&h->mutex);
    return failed;
}

/* Create the state of each kernel; return whether all were created. */
bool create_states(handle *h, char *error, size_t error_size) {
    const thread_count count(h->threads);
    for (int64_t i = 0; i < h->plan->steps.count; ++i) {
        const plan::step &step = h->plan->steps[i];
        if (!step.create) continue;
        char text[512] = "";
        h->states[i] = step.create(h->threads, text, sizeof text);
        if (h->states[i]) continue;
        text[sizeof text - 1] = 0;
        snprintf(error, error_size, "kernel %s: %s", h->plan->symbols[i],
                 text[0] ? text : "its create function gave no reason");
        return false;
    }
    return true;
}

/* The plan that a caller names. */
const korch_plan &named(const korch_plan *plan) { return plan ? *plan : *korch_listed[0]; }

template <class T>
const T *rows_of(const plan::table<T> &table, int64_t *count) {
    *count = table.count;
    return table.rows;
}

} // namespace

extern "C" {

int korch_catches_interrupts = 0;

int korch_abi_version(void) { return KORCH_ABI_VERSION; }

const korch_plan *const *korch_plans(int64_t *count) { return rows_of(korch_listed, count); }

const korch_tensor *korch_inputs(const korch_plan *plan, int64_t *count) { return rows_of(named(plan).inputs, count); }

const korch_tensor *korch_outputs(const korch_plan *plan, int64_t *count) { return rows_of(named(plan).outputs, count); }

const korch_tensor *korch_constants(const korch_plan *plan, int64_t *count) {
    return rows_of(named(plan).constants, count);
}

const char *const *korch_kernels(const korch_plan *plan, int64_t *count) { return rows_of(named(plan).symbols, count); }

int64_t korch_arena_bytes(const korch_plan *plan) { return named(plan).arena_bytes; }

void korch_destroy(void *pointer) {
    handle *h = (handle *)pointer;
    if (!h) return;
    strike_off(h);
    for (int64_t i = h->plan->steps.count; h->states && i-- > 0;)
        if (h->states[i]) h->plan->steps[i].destroy(h->states[i]);
    free(h->arena);
    free(h->constants);
    free(h->table);
    free(h->states);
    free(h->usual_ns);
    free(h->met);
    free(h->ended);
    free(h->before);
    pthread_mutex_destroy(&h->mutex);
    free(h);
}

void *korch_create(const korch_plan *chosen, const void *const *constants, int threads, char *error,
                   size_t error_size) {
    const korch_plan &plan = named(chosen);
    if (threads < 1 || threads > MOST_THREADS) {
        snprintf(error, error_size, "it is for %d threads; expected 1 to %d", threads, MOST_THREADS);
        return nullptr;
    }
    handle *h = (handle *)calloc(1, sizeof(handle));
    if (!h) {
        snprintf(error, error_size, "out of memory");
        return nullptr;
    }
    h->plan = &plan;
    pthread_mutex_init(&h->mutex, nullptr);
    h->threads = threads;
    h->arena = (char *)allocate(plan.arena_bytes);
    h->constants = (const void **)calloc(plan.constants.count + 1, sizeof(void *));
    h->table = (void **)calloc(threads * plan.slots.count + 1, sizeof(void *));
    h->states = (void **)calloc(plan.steps.count + 1, sizeof(void *));
    h->usual_ns = (int64_t *)calloc(plan.steps.count + 1, sizeof(int64_t));
    h->met = (korch::Count *)allocate(threads * sizeof(korch::Count)); /* all 0, as are the next */
    h->ended = (korch::Count *)allocate(plan.queues * sizeof(korch::Count));
    h->before = (uint32_t *)calloc((threads + 1) * plan.queues, sizeof(uint32_t));
    if (!h->arena || !h->constants || !h->table || !h->states || !h->usual_ns || !h->met || !h->ended || !h->before) {
        snprintf(error, error_size, "out of memory: the arena needs %lld bytes",
                 (long long)plan.arena_bytes);
        korch_destroy(h);
        return nullptr;
    }
    for (int64_t i = 0; i < plan.constants.count; ++i) h->constants[i] = constants[i];
    for (int t = 0; t < threads; ++t)
        for (int64_t i = 0; i < plan.slots.count; ++i) h->table_of(t)[i] = locate(h, plan.slots[i], t);
    if (create_states(h, error, error_size)) {
        enlist(h);
        return h;
    }
    korch_destroy(h);
    return nullptr;
}

int korch_run(void *h, const void *const *inputs, void *const *outputs) {
    return run<false>((handle *)h, inputs, outputs, nullptr);
}

int korch_run_timed(void *h, const void *const *inputs, void *const *outputs, int64_t *kernel_ns) {
    return run<true>((handle *)h, inputs, outputs, kernel_ns);
}

} // extern "C"
