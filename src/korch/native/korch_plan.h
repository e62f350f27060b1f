/* The types of a plan's generated tables. */
#include <stddef.h>
#include <stdint.h>

namespace plan {

enum place_kind { ARENA, CONSTANT, INPUT, OUTPUT };

/* Where a buffer lies: an offset in the arena, or the position of a constant, input or output; of a
 * piece of an output also how far from its begin, in bytes. */
struct slot {
    place_kind place;
    int64_t at;
    int64_t offset;
};

/* One kernel call: its buffers are SLOTS[first_slot], SLOTS[first_slot + 1], and so on. Of a step for
 * which nothing runs, a concatenation in place, `run` is null. One that is alone may have threads of its
 * own. The others, as many as follow each other, run in one parallel region if two of them or more open
 * regions. */
struct step {
    int (*run)(void *state, void *const *buffers);
    void *(*create)(int threads, char *error, size_t error_size);
    void (*destroy)(void *state);
    int64_t first_slot;
    bool is_alone;
    bool opens_regions;
};

/* A model output that no kernel writes in place. */
struct copy {
    int64_t output;
    slot from;
};

} // namespace plan
