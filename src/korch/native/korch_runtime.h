/* What the files of the runtime share. */
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "korch.h"

/* Marks what other programs may call; all else is hidden. */
#define KORCH_API __attribute__((visibility("default")))

/* -- Threads (korch_threads.c) -------------------------------------------------------------------------------------- */

/* The most threads of a team. */
enum { KORCH_MOST_THREADS = 1024 };

/* A counter of one thread, for which other threads wait. Each has its own cache line. Only its thread sets it, except that
 * the first thread of a team may set it to 0 while no other is in a region. */
typedef struct {
    _Alignas(64) uint32_t value;
    uint32_t sleepers;
} korch_count;

typedef struct korch_team korch_team;

/* A thread among those that run a kernel together. Kernels read all but the last two (`korch.tile.llvm.print`). */
typedef struct korch_member {
    int64_t me, threads;
    void (*meet)(struct korch_member *); /* a barrier; null if there is one thread */
    korch_team *team;
    uint32_t turn; /* how many regions and barriers the team's threads have begun and passed */
} korch_member;

/* What the threads of a team run, such as a kernel's function for several threads, which is given its buffers; returns
 * whether it failed. */
typedef int (*korch_job)(void *given, korch_member *own);

/* What the first thread of a team calls; embedded in what these functions need. Kernels' own regions have none. */
typedef struct korch_hooks {
    void (*waited)(struct korch_hooks *, int64_t since_ns); /* after a wait for the others; may be null */
    void (*all_came)(struct korch_hooks *);                 /* at a barrier, while all others wait; may be null */
} korch_hooks;

/* Threads that wait for regions. A thread's counter is the number of turns that it has reached: the begin of a region, a
 * barrier, or the end of a region. At a begin or a barrier, the first thread sets its counter last. */
struct korch_team {
    int64_t threads, wanted; /* fewer than wanted if the system has no more */
    int64_t look_ns;         /* how long its threads spin before they sleep */
    korch_job run;
    void *given;
    korch_hooks *hooks;
    int failed;
    int core;          /* that of the first thread, which the others were moved off */
    cpu_set_t allowed; /* the cores that the first thread may use */
    int64_t region;    /* its number in a trace */
    int64_t begun;     /* how many of the other threads have begun */
    int *numbers;      /* the system's numbers of the other threads */
    korch_team *next;  /* in the list of idle teams */
    korch_count counts[];
};

int64_t korch_now_ns(void);
int64_t korch_look_ns(int64_t threads);
bool korch_is_at(const korch_count *count, uint32_t wanted);
void korch_set(korch_count *count, uint32_t value);
void korch_wait_for(korch_count *count, uint32_t wanted, int64_t look_ns);

/* Run a job on a number of threads; within a region, on the calling thread only. Returns whether any failed. */
int korch_parallel(int64_t threads, korch_job run, void *given, korch_hooks *hooks);

/* The same without hooks: what kernels call. */
KORCH_API int korch_region(int threads, korch_job team, void *const *buffers);

/* How many cores this process may use. */
KORCH_API void korch_use_cores(int count);

/* The number of threads for regions that do not name one, for the calling thread; set it, and return the one before. */
KORCH_API int korch_max_threads(void);
KORCH_API int korch_set_threads(int threads);

/* Complete all runs and let no other begin, or let them begin again. */
void korch_hold_handles(bool holds);

/* -- Traces (korch_trace.c): what each thread does, for `korch.report.threads` ----------------------------------------- */

extern int korch_traces; /* 0: nothing, 1: regions, 2: tasks */
int64_t korch_trace_region(void);
void korch_trace_work(int64_t region, int64_t me, bool begins);
void korch_trace_wait(int64_t since_ns);
void korch_trace_task(bool is_wait, int64_t me, int64_t task, const int64_t *rest, int64_t since_ns);
void korch_trace_begun(int64_t now_ns);

/* -- Plans (korch_plan.c) ------------------------------------------------------------------------------------------- */

/* A table of a plan: `korch.tile.llvm.constants` prints it. */
#define KORCH_TABLE(type) struct { int64_t count; const type *rows; }

/* What a plan reads and writes, in the order in which pointers are passed. Its other tables follow (korch_plan.c). */
typedef struct {
    KORCH_TABLE(korch_tensor) inputs, outputs, constants;
} korch_plan;

typedef struct korch_handle korch_handle;

/* Prepare to run, as korch_start does. The packed constants are aligned to 64 bytes; they and this array must stay as they are
 * until korch_destroy. */
KORCH_API korch_handle *korch_create(const korch_plan *plan, const void *const *constants, int threads, char *error,
                           size_t error_size);

/* Run once, as korch_serve does. Calls on the same handle are serialized. */
KORCH_API int korch_run(korch_handle *handle, const void *const *inputs, void *const *outputs);

/* The same, and write the nanoseconds of each kernel to kernel_ns, unless it is null. */
KORCH_API int korch_run_timed(korch_handle *handle, const void *const *inputs, void *const *outputs, int64_t *kernel_ns);

/* Free a handle of korch_create. Null is allowed. */
KORCH_API void korch_destroy(korch_handle *handle);

/* One kernel call: its buffers are slots[first_slot], slots[first_slot + 1], and so on. `run` is null for a step that runs
 * nothing (a concatenation in place). `team` is the function that all threads of a team call; it is null for a step that
 * one thread runs, and for a step with `is_alone`, which may have threads of its own. `tasks` runs a part of a stage on the
 * thread `me`; it is null if the step is not run as tasks. `create` and `destroy` are null if the kernel has no state. */
typedef struct {
    int (*run)(void *state, void *const *buffers);
    korch_job team;
    void (*tasks)(int stage, void *const *buffers, int64_t begin, int64_t end, int64_t me);
    void *(*create)(int threads, char *error, size_t error_size);
    void (*destroy)(void *state);
    int64_t first_slot, is_alone;
} korch_step;

typedef KORCH_TABLE(korch_step) korch_steps;

/* Create the state of each kernel. If one can't be created, return null, with a message and its number in `failed`. */
void **korch_create_states(korch_steps steps, int threads, char *error, size_t error_size, int64_t *failed);
void korch_destroy_states(korch_steps steps, void **states);

/* -- ONNX Runtime (korch_onnxruntime.c) ----------------------------------------------------------------------------- */

/* Where the library is. The path is copied. */
#define KORCH_ONNXRUNTIME "libonnxruntime.so.1"
KORCH_API void korch_use_onnxruntime(const char *path);

/* -- Objects (korch_load.c) ----------------------------------------------------------------------------------------- */

/* Code and constants that are loaded from relocatable objects. */
typedef struct korch_code korch_code;

/* Load the objects of an archive (`ar`) for a machine, by ELF's number, or 0 for this one: those for another can't be run. If
 * that fails, return null, with a message in `error`. */
KORCH_API korch_code *korch_load(int machine, const void *archive, int64_t size, char *error, size_t error_size);
KORCH_API const void *korch_symbol(const korch_code *code, const char *name);
KORCH_API void korch_unload(korch_code *code);

/* The plans of a library, and the flags that its CPU must have: what is named korch_listed. */
typedef struct {
    int64_t count;
    const korch_plan *const *rows;
    const char *cpu_flags;
} korch_plan_list;

/* A model (korch_open.c): `numbers` say how its plans serve sizes (korch_fit.c). */
struct korch_model {
    korch_code *code;
    const korch_plan_list *plans;
    char *weights;
    const void **constants; /* of all plans, one plan after the other */
    int64_t *numbers;
};

/* Memory that starts at a huge page if it is large; null if there is none. It is filled with zeros; the system provides
 * pages of large memory when they are used first. */
void *korch_allocate(int64_t size);

/* Free memory of korch_allocate. Null is allowed. */
void korch_release(void *memory);

/* The first flag of a list that this CPU does not have, as the system names them; null if it has all. Each ends with a space. */
const char *korch_missing_flag(const char *needed);

/* Whether this process may use matrix units (Intel AMX). */
KORCH_API int korch_matrix_units(void);
