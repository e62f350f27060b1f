/* The C interface of a library that Korch builds.
 *
 * A library holds one plan, or several plans for different shapes of the inputs, which share kernels. `korch_create`
 * takes the packed constants (the tensors of the artifact's weights.safetensors, in the order of `korch_constants`;
 * for one of several plans, those that program.json names), allocates the arena and prepares every kernel.
 * `korch_run` does not allocate memory and only runs kernels.
 *
 * `korch unpack` writes the packed constants as weights.bin: first an int64_t, the number of offsets; then
 * an int64_t for each constant of the first plan in the order of `korch_constants`, then for each constant
 * of the next plan: the offset of its tensor in the file, a multiple of 64; then the tensors.
 */
#ifndef KORCH_H
#define KORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KORCH_ABI_VERSION 4

/* A model input, a model output or a packed constant. */
typedef struct {
    const char *name;
    const char *dtype; /* f64 f32 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8 bool */
    int64_t rank;
    const int64_t *shape; /* of a constant: the packed shape, outermost axis first */
    int64_t size_bytes;
} korch_tensor;

/* A plan. Where a function takes one, null stands for the first plan. */
typedef struct korch_plan korch_plan;

/* The version of this interface that the library was built with. */
int korch_abi_version(void);

/* All plans. Use the plan whose inputs have the shapes of your inputs. */
const korch_plan *const *korch_plans(int64_t *count);

/* Descriptions, in the order in which pointers are passed. */
const korch_tensor *korch_inputs(const korch_plan *plan, int64_t *count);
const korch_tensor *korch_outputs(const korch_plan *plan, int64_t *count);
const korch_tensor *korch_constants(const korch_plan *plan, int64_t *count);

/* The symbol of each kernel, in the order in which they run; "" for a step that runs nothing: a concatenation
 * whose operands are written directly into its result. */
const char *const *korch_kernels(const korch_plan *plan, int64_t *count);

/* The size of the arena that a handle allocates, in bytes. */
int64_t korch_arena_bytes(const korch_plan *plan);

/* Prepare to run.
 *
 * constants: aligned to 64 bytes; they must stay valid and unchanged until korch_destroy.
 * threads: the OpenMP threads of every run, at most 1024; the number that the artifact was built for.
 * error: receives a message, truncated to error_size bytes, if null is returned.
 */
void *korch_create(const korch_plan *plan, const void *const *constants, int threads, char *error,
                   size_t error_size);

/* Run once. Inputs and outputs are dense, row-major, and aligned to their element's size; no output may
 * overlap another tensor. Calls on the same handle are serialized; calls on different handles run
 * concurrently. A process that has run a plan may fork; both parent and child can then run plans.
 *
 * Returns 0, 1 + the position of the kernel that failed, or KORCH_INTERRUPTED.
 */
int korch_run(void *handle, const void *const *inputs, void *const *outputs);

/* The same, and write the nanoseconds of each kernel to kernel_ns. */
int korch_run_timed(void *handle, const void *const *inputs, void *const *outputs,
                    int64_t *kernel_ns);

/* If this is set, a SIGINT during a run in the process's main thread ends the run between two kernels or tasks, after the
 * process's own signal handler has been called. The outputs are then undefined; the handle can be used again. A run is not
 * interrupted if the handle's previous run took less than 20 ms. */
#define KORCH_INTERRUPTED (-1)
extern int korch_catches_interrupts;

/* Free a handle of korch_create. Null is allowed. */
void korch_destroy(void *handle);

#ifdef __cplusplus
}
#endif

#endif
