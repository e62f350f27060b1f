/* The types of a plan's generated tables. */
#include <stddef.h>
#include <stdint.h>

#include "korch_team.h"

namespace plan {

enum place_kind { ARENA, CONSTANT, INPUT, OUTPUT };

/* Where a buffer lies: an offset in the arena, or the position of a constant, input or output; of a
 * part of an output also how far from its begin, in bytes; in the arena, how much farther each next thread's is. */
struct slot {
    place_kind place;
    int64_t at;
    int64_t offset;
};

/* One kernel call: its buffers are SLOTS[first_slot], SLOTS[first_slot + 1], and so on. Of a step for
 * which nothing runs, a concatenation in place, `run` is null. `team` is what all threads of a team call; it
 * is null for a step that one thread runs, and for one that is alone: it may have threads of its own. The
 * others, as many as follow each other, run in one parallel region if two of them or more have `team`.
 * `tasks` runs a part of a stage on the thread `me`; it is null where no task does. */
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

/* Steps [begin, end) that run as tasks: thread t of segment s has those from FIRST_TASKS[s * QUEUES + t] to
 * before FIRST_TASKS[s * QUEUES + t + 1]. */
struct segment {
    int64_t begin, end;
};

/* A range of grid points of a stage of a step, or, if the stage is -1, the whole step. It waits for those of
 * WAITS from `first_wait` to before the next task's, and meanwhile fetches what it reads of constants: those of
 * ALL_AHEAD from `first_ahead`. If `unit` is not 0, it is share `begin` of those that QUEUES tasks have of as many
 * points or rows as the extent says, and begins at a multiple of `unit`. */
struct task {
    int64_t step;
    int stage;
    int64_t begin, end;
    int64_t first_wait, first_ahead;
    long unit;
    int64_t extent;
};

/* A number that follows from the sizes of a run, which are an input of the model. */
struct extent {
    int64_t input;
    int64_t (*at)(const int64_t *sizes);
};

/* What extents are made of beside sums, products and quotients. */
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* A thread must have ended this number of tasks of its queue. */
struct wait {
    int queue;
    uint32_t ended;
};

/* Bytes of a buffer of a step. */
struct ahead {
    int64_t buffer, begin, end;
};

} // namespace plan
