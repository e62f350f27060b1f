/* Kernels ("parts") that run one after another, several times: the iterations of a loop. A state has two buffers; each
 * iteration reads the one that the iteration before has written, and writes the other one. `korch.runtime.loop` prints
 * the tables. */
#include "korch_runtime.h"

enum { MOST_BUFFERS = 64 }; /* of a part */
enum { DATA = -1, NONE = -2 };

/* Memory: one of the whole kernel's buffers from a byte offset on, or the kernel's own data, or none. */
typedef struct {
    int64_t buffer, offset;
} place;

/* A buffer of a part: a tensor of the iteration from a byte offset on; `each` bytes lie between those of two threads. */
typedef struct {
    int64_t tensor, offset, each;
} slot;

/* A state: the tensors from and to which an iteration reads and writes it, its first and last buffers, and the two others. */
typedef struct {
    int64_t read, written;
    place first, last, others;
    int64_t size;
} state;

/* Where a tensor's first slice is. The next one is `step` bytes further; if that is negative, the last one is used first. */
typedef struct {
    int64_t tensor;
    place place;
    int64_t step;
} stream;

/* A tensor to which a part of another one is copied at the end of each iteration. */
typedef struct {
    int64_t to;
    slot from;
    int64_t size;
} copy;

typedef struct {
    int64_t threads, trips; /* the most iterations; `count` has their number, or is none */
    place count;
    int64_t tensors;
    korch_job team; /* the kernel's own function for several threads, or null */
    const unsigned char *data;
    korch_steps parts;
    KORCH_TABLE(slot) slots;
    KORCH_TABLE(state) states;
    KORCH_TABLE(stream) streams, fixed; /* fixed: those without a step */
    KORCH_TABLE(copy) copies;
} loop;

KORCH_API void korch_loop_destroy(const loop *loop, void *states) { korch_destroy_states(loop->parts, states); }

KORCH_API void *korch_loop_create(const loop *loop, int threads, char *error, size_t error_size) {
    int64_t failed;
    return korch_create_states(loop->parts, threads, error, error_size, &failed);
}

static char *locate(const loop *loop, void *const *buffers, place at) {
    return (at.buffer == DATA ? (char *)loop->data : (char *)buffers[at.buffer]) + at.offset;
}

static char *slot_at(char *const *at, const slot *slot, int64_t me) {
    return at[slot->tensor] + slot->offset + me * slot->each;
}

/* Set the tensors of an iteration. */
static void bind(const loop *loop, void *const *buffers, int64_t trip, int64_t trips, char **at) {
    for (int64_t i = 0; i < loop->states.count; ++i) {
        const state *const own = &loop->states.rows[i];
        at[own->read] = trip == 0 ? locate(loop, buffers, own->first) : at[own->written];
        const bool ends = trip + 1 == trips && own->last.buffer != NONE;
        at[own->written] = ends ? locate(loop, buffers, own->last)
                                : locate(loop, buffers, own->others) + (trip & 1) * own->size;
    }
    for (int64_t i = 0; i < loop->streams.count; ++i) {
        const stream *const own = &loop->streams.rows[i];
        at[own->tensor] = locate(loop, buffers, own->place) +
                          (own->step < 0 ? (trip + 1 - trips) * own->step : trip * own->step);
    }
}

static void meet(korch_member *own) {
    if (own->threads > 1) own->meet(own);
}

/* Run all iterations as one of the threads. If parts have threads of their own, it is the only one, and none has `team`. The
 * first thread runs the parts without `team`, and copies; the threads meet before and after parts with `team`. */
static int run_trips(const loop *loop, void **states, void *const *buffers, korch_member *own) {
    char **const at = __builtin_alloca((size_t)loop->tensors * sizeof(char *));
    for (int64_t i = 0; i < loop->fixed.count; ++i)
        at[loop->fixed.rows[i].tensor] = locate(loop, buffers, loop->fixed.rows[i].place);
    int64_t trips = loop->trips;
    if (loop->count.buffer != NONE) {
        const int64_t count = *(const int64_t *)locate(loop, buffers, loop->count);
        trips = count < 1 ? 1 : count < trips ? count : trips;
    }
    int failed = 0;
    for (int64_t trip = 0; trip < trips; ++trip) {
        bind(loop, buffers, trip, trips, at);
        for (int64_t i = 0; i < loop->parts.count; ++i) {
            const korch_step *const part = &loop->parts.rows[i];
            const bool is_last = i + 1 == loop->parts.count;
            const bool is_followed = is_last ? loop->copies.count || loop->parts.rows[0].team : part[1].team;
            void *given[MOST_BUFFERS];
            const int64_t last = is_last ? loop->slots.count : part[1].first_slot;
            for (int64_t s = part->first_slot; s < last; ++s)
                given[s - part->first_slot] = slot_at(at, &loop->slots.rows[s], own->me);
            if (part->team) failed |= part->team(given, own);
            else if (own->me == 0) failed |= part->run(states ? states[i] : NULL, given);
            if (failed && own->threads == 1) return failed; /* otherwise the other threads wait for this one */
            if (part->team || is_followed) meet(own);
        }
        for (int64_t i = 0; own->me == 0 && i < loop->copies.count; ++i) {
            const copy *const copy = &loop->copies.rows[i];
            memcpy(at[copy->to], slot_at(at, &copy->from, 0), (size_t)copy->size);
        }
        if (loop->copies.count) meet(own);
    }
    return failed;
}

KORCH_API int korch_loop_team(const loop *loop, void *const *buffers, korch_member *own) {
    return run_trips(loop, NULL, buffers, own);
}

KORCH_API int korch_loop_run(const loop *loop, void *states, void *const *buffers) {
    if (loop->team) return korch_region((int)loop->threads, loop->team, buffers);
    korch_member own = {.threads = 1};
    return run_trips(loop, states, buffers, &own);
}
