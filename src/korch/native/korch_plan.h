/* The data of a plan: the tables that `korch.runtime.source` prints. All integers have 64 bits. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "korch.h"
#include "korch_team.h"

namespace plan {

enum place_kind : int64_t { ARENA, CONSTANT, INPUT, OUTPUT };

/* Where a buffer is: `at` is an offset in the arena, or the number of a constant, input or output. `offset` is, for a
 * part of an output, its byte offset in the output; in the arena, the distance between the buffers of two threads. */
struct slot {
    place_kind place;
    int64_t at;
    int64_t offset;
};

/* One kernel call: its buffers are slots[first_slot], slots[first_slot + 1], and so on. `run` is null for a step that runs
 * nothing (a concatenation in place). `team` is the function that all threads of a team call; it is null for a step that
 * one thread runs, and for a step with `is_alone`, which may have threads of its own. Consecutive steps without `is_alone`
 * run in one parallel region if at least two of them have `team`.
 * `tasks` runs a part of a stage on the thread `me`; it is null if the step is not run as tasks. */
struct step {
    int (*run)(void *state, void *const *buffers);
    int (*team)(void *const *buffers, korch::Member &own);
    void (*tasks)(int stage, void *const *buffers, long begin, long end, long me);
    void *(*create)(int threads, char *error, size_t error_size);
    void (*destroy)(void *state);
    int64_t first_slot;
    int64_t is_alone; /* 0 or 1 */
};

/* A model output that no kernel writes in place. */
struct copy {
    int64_t output;
    slot from;
};

/* Steps [begin, end) that run as tasks: in segment s, thread t runs the tasks from first_tasks[s * queues + t] up to but
 * not including first_tasks[s * queues + t + 1]. */
struct segment {
    int64_t begin, end;
};

/* A range of grid points of one stage of a step, or, if the stage is -1, the whole step. It waits for the entries of `waits`
 * from `first_wait` up to the next task's `first_wait`. */
struct task {
    int64_t step, stage, begin, end;
    int64_t first_wait;
};

/* A condition to wait for: the thread of `queue` must have finished this number of tasks. */
struct wait {
    int64_t queue, ended;
};

template <class T>
struct table {
    int64_t count;
    const T *rows;
    const T &operator[](int64_t i) const { return rows[i]; }
};

} // namespace plan

/* A plan. A handle holds the pointers of all slots, in one table per thread. Pointers to the arena and the constants are
 * set once; pointers to model inputs and outputs are set at the start of each run. */
struct korch_plan {
    plan::table<korch_tensor> inputs, outputs, constants;
    plan::table<plan::step> steps;
    plan::table<const char *> symbols;
    plan::table<plan::slot> slots;     /* the buffers of all steps, one step after the other */
    plan::table<int64_t> bindings;     /* the slots whose pointers differ from run to run */
    plan::table<plan::copy> copies;
    plan::table<plan::segment> segments;
    plan::table<int64_t> first_tasks;
    plan::table<plan::task> tasks;     /* of all queues, one queue after the other; the last one only ends `waits` */
    plan::table<plan::wait> waits;
    int64_t arena_bytes;
    int64_t queues;                    /* one per thread, at least 1 */
};

/* The plans of a library, which `korch.runtime.source` prints. */
extern "C" __attribute__((visibility("hidden"))) const plan::table<const korch_plan *> korch_listed;
