/* The types of a plan's generated tables. */
#include <stddef.h>
#include <stdint.h>

#include "korch_team.h"

namespace plan {

enum place_kind { ARENA, CONSTANT, INPUT, OUTPUT };

/* Where a buffer is: `at` is an offset in the arena, or the number of a constant, input or output. `offset` is, for a
 * part of an output, its byte offset in the output; in the arena, the distance between the buffers of two threads. */
struct slot {
    place_kind place;
    int64_t at;
    int64_t offset;
};

/* One kernel call: its buffers are SLOTS[first_slot], SLOTS[first_slot + 1], and so on. `run` is null for a step that runs
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
    bool is_alone;
};

/* A model output that no kernel writes in place. */
struct copy {
    int64_t output;
    slot from;
};

/* Steps [begin, end) that run as tasks: in segment s, thread t runs the tasks from FIRST_TASKS[s * QUEUES + t] up to but
 * not including FIRST_TASKS[s * QUEUES + t + 1]. */
struct segment {
    int64_t begin, end;
};

/* A range of grid points of one stage of a step, or, if the stage is -1, the whole step. It waits for the entries of WAITS
 * from `first_wait` up to the next task's `first_wait`. */
struct task {
    int64_t step;
    int stage;
    int64_t begin, end;
    int64_t first_wait;
};

/* A condition to wait for: the thread of `queue` must have finished this number of tasks. */
struct wait {
    int queue;
    uint32_t ended;
};

} // namespace plan
