/* The C interface of a library that Korch builds.
 *
 * One library holds one plan. `korch_create` takes the packed constants (the tensors of the
 * artifact's weights.safetensors, in the order of `korch_constants`), allocates the arena and
 * prepares every kernel; `korch_run` neither allocates nor calls anything but kernels.
 */
#ifndef KORCH_H
#define KORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KORCH_ABI_VERSION 1

/* A model input, a model output or a packed constant. */
typedef struct {
    const char *name;
    const char *dtype; /* f64 f32 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8 bool */
    int64_t rank;
    const int64_t *shape; /* of a constant: as packed, outermost first */
    int64_t size_bytes;
} korch_tensor;

/* The version of this interface that the library was built with. */
int korch_abi_version(void);

/* Descriptions, in the order in which pointers are passed. */
const korch_tensor *korch_inputs(int64_t *count);
const korch_tensor *korch_outputs(int64_t *count);
const korch_tensor *korch_constants(int64_t *count);

/* The symbol of each kernel, in the order in which they run. */
const char *const *korch_kernels(int64_t *count);

/* Bytes of the arena that a handle allocates. */
int64_t korch_arena_bytes(void);

/* Prepare to run.
 *
 * constants: aligned to 64 bytes, alive and unchanged until korch_destroy.
 * threads: OpenMP threads of every run.
 * error: receives a message, cut to error_size bytes, if null is returned.
 */
void *korch_create(const void *const *constants, int threads, char *error, size_t error_size);

/* Run once. Inputs and outputs are dense, row-major, and aligned to their element's size; no
 * output overlaps anything else. Calls on one handle wait for each other.
 *
 * Returns 0, or 1 + the position of the kernel that failed.
 */
int korch_run(void *handle, const void *const *inputs, void *const *outputs);

/* The same, and write the nanoseconds of each kernel to kernel_ns. */
int korch_run_timed(void *handle, const void *const *inputs, void *const *outputs,
                    int64_t *kernel_ns);

/* Free what korch_create made. Null is allowed. */
void korch_destroy(void *handle);

#ifdef __cplusplus
}
#endif

#endif
