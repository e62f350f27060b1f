/* The C interface of Korch's runtime, `libkorch_runtime`.
 *
 * A model is one plan, or several plans for different shapes of the inputs, which share kernels and weights.
 * `korch_open` loads a folder that `korch unpack` has written. `korch_create` allocates a plan's arena and prepares every
 * kernel; `korch_run` allocates nothing and only runs kernels.
 */
#ifndef KORCH_H
#define KORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KORCH_ABI_VERSION 5

/* A model input, a model output or a packed constant. */
typedef struct {
    const char *name;
    const char *dtype; /* f64 f32 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8 bool */
    int64_t rank;
    const int64_t *shape; /* of a constant: the packed shape, outermost axis first */
    int64_t size_bytes;
} korch_tensor;

typedef struct korch_model korch_model;
typedef struct korch_plan korch_plan;
typedef struct korch_handle korch_handle;

/* The version of this interface that the library was built with. */
int korch_abi_version(void);

/* Load a folder that `korch unpack` has written: the kernels for the best instruction set that this CPU has, and the
 * weights. If that fails, return null; error then receives a message, truncated to error_size bytes. */
korch_model *korch_open(const char *folder, char *error, size_t error_size);

/* Free a model, after all of its handles. Null is allowed. */
void korch_close(korch_model *model);

/* All plans. Use the plan whose inputs have the shapes of your inputs. */
const korch_plan *const *korch_plans(const korch_model *model, int64_t *count);

/* The packed constants of a plan of a model, in the order of `korch_constants`. */
const void *const *korch_weights(const korch_model *model, const korch_plan *plan);

/* Descriptions, in the order in which pointers are passed. */
const korch_tensor *korch_inputs(const korch_plan *plan, int64_t *count);
const korch_tensor *korch_outputs(const korch_plan *plan, int64_t *count);
const korch_tensor *korch_constants(const korch_plan *plan, int64_t *count);

/* The symbol of each kernel, in the order in which they run; "" for a step that runs nothing: a concatenation
 * whose operands are written directly into its result. */
const char *const *korch_kernels(const korch_plan *plan, int64_t *count);

/* The size of the arena that a handle allocates, in bytes. */
int64_t korch_arena_bytes(const korch_plan *plan);

/* Prepare to run. If that fails, return null, with a message in error.
 *
 * constants: the packed constants, aligned to 64 bytes; they must stay valid and unchanged until korch_destroy.
 * threads: the threads of every run, at most 1024; 0 for the number that the plan was built for.
 */
korch_handle *korch_create(const korch_plan *plan, const void *const *constants, int threads, char *error,
                           size_t error_size);

/* Run once. Inputs and outputs are dense, row-major, and aligned to their element's size; no output may
 * overlap another tensor. Calls on the same handle are serialized; calls on different handles run
 * concurrently. A process that has run a plan may fork; both parent and child can then run plans.
 *
 * Returns 0, 1 + the position of the kernel that failed, or KORCH_INTERRUPTED.
 */
int korch_run(korch_handle *handle, const void *const *inputs, void *const *outputs);

/* The same, and write the nanoseconds of each kernel to kernel_ns. */
int korch_run_timed(korch_handle *handle, const void *const *inputs, void *const *outputs, int64_t *kernel_ns);

/* If this is set, a SIGINT during a run in the process's main thread ends the run between two kernels or tasks, after the
 * process's own signal handler has been called. The outputs are then undefined; the handle can be used again. A run is not
 * interrupted if the handle's previous run took less than 20 ms. */
#define KORCH_INTERRUPTED (-1)
extern int korch_catches_interrupts;

/* Free a handle of korch_create. Null is allowed. */
void korch_destroy(korch_handle *handle);

#ifdef __cplusplus
}
#endif

#endif
