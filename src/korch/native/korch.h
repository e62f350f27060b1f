/* The C interface of Korch's runtime, `libkorch_runtime`.
 *
 * A model is one plan, or several plans for different shapes of the inputs, or for ranges of sizes, which share kernels and
 * weights, or a model with states. `korch_open` loads a folder that `korch unpack` has written. `korch_fit` chooses the plan for the shapes of the
 * inputs; `korch_serve` runs it.
 */
#ifndef KORCH_H
#define KORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KORCH_ABI_VERSION 7

/* An input or an output, or a packed constant. */
typedef struct {
    const char *name;
    const char *dtype; /* f64 f32 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8 bool */
    int64_t rank;
    const int64_t *shape; /* of a constant: the packed shape, outermost axis first */
    int64_t size_bytes;
} korch_tensor;

typedef struct korch_model korch_model;
typedef struct korch_session korch_session;

/* The version of this interface that the library was built with. */
int korch_abi_version(void);

/* Load a folder that `korch unpack` has written. If that fails, or this CPU can't run its kernels, return null; error then receives a message, truncated to error_size bytes. */
korch_model *korch_open(const char *folder, char *error, size_t error_size);

/* Free a model, after all of its sessions. Null is allowed. */
void korch_close(korch_model *model);

/* Prepare to run a model. If that fails, return null, with a message in error. A session is used by one thread at a time;
 * several sessions of a model run concurrently. A process that has run a model may fork; both can then run it.
 *
 * threads: the threads of every run, at most 1024; 0 for the number that the model was built for.
 */
korch_session *korch_start(const korch_model *model, int threads, char *error, size_t error_size);

/* Choose the plan for inputs of these shapes: for each input, in the model's order, the sizes of its axes. Return the
 * outputs with their shapes, which are valid until the next call. If no plan takes the shapes, or there is no memory for it,
 * return null, with a message in error. The first use of a plan allocates its memory. */
const korch_tensor *korch_fit(korch_session *session, const int64_t *const *shapes, char *error, size_t error_size);

/* Run once, after `korch_fit` has returned the outputs. Inputs and outputs have these shapes, and are dense, row-major, and
 * aligned to their element's size; no output may overlap another tensor. Without states, nothing is allocated.
 *
 * Returns 0, 1 + the position of the kernel that failed, KORCH_INTERRUPTED or KORCH_UNFIT.
 */
int korch_serve(korch_session *session, const void *const *inputs, void *const *outputs);

/* Models with states, such as the keys and values of a decoder. A session has the states, which are no inputs or outputs here:
 * it begins without rows, and each run appends some. All other inputs are given, also masks of all rows and positions.
 * `korch_fit` takes any number of new rows for which there is room and plans (of a model whose rows depend on later ones, the
 * numbers that a plan has), and `korch_serve` runs them in parts, of which each may allocate memory. `korch_serve` may be called
 * again for as many rows more; it returns KORCH_UNFIT, and writes nothing, if `korch_fit` would then return null. After a
 * failure of a part, also for lack of memory (KORCH_UNFIT), the session has the rows of the parts before it. */
#define KORCH_UNFIT (-2)

/* The number of rows so far. */
int64_t korch_length(const korch_session *session);

/* Forget all rows but the first ones. Returns 1, without a change, if there are not as many. */
int korch_truncate(korch_session *session, int64_t length);

/* Return another session with a copy of the rows. If there is no memory, return null, with a message in error. */
korch_session *korch_fork(const korch_session *session, char *error, size_t error_size);

/* Free a session. Null is allowed. */
void korch_stop(korch_session *session);

/* If this is set, a SIGINT during a run in the process's main thread ends the run between two kernels or tasks, after the
 * process's own signal handler has been called. The outputs are then undefined; the session can be used again. A run is not
 * interrupted if the session's previous run took less than 20 ms. */
#define KORCH_INTERRUPTED (-1)
extern int korch_catches_interrupts;

#ifdef __cplusplus
}
#endif

#endif
