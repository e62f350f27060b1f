/* The types of a plan's generated tables. */
#include <stddef.h>
#include <stdint.h>

namespace plan {

enum place_kind { ARENA, CONSTANT, INPUT, OUTPUT };

/* Where a buffer lies: an offset in the arena, or the position of a constant, input or output. */
struct slot {
    place_kind place;
    int64_t at;
};

/* One kernel call: its buffers are SLOTS[first_slot], SLOTS[first_slot + 1], and so on. */
struct step {
    int (*run)(void *state, void *const *buffers);
    void *(*create)(int threads, char *error, size_t error_size);
    void (*destroy)(void *state);
    int64_t first_slot;
};

/* A model output that no kernel writes in place. */
struct copy {
    int64_t output;
    slot from;
};

} // namespace plan
