/* The kernels of the oneDNN provider: creates and runs one primitive with its post-operations.
 *
 * The library is opened when the first kernel is created. Its functions are found by name; constants are numbers of its
 * third version. It runs on Korch's threads: threads of its own would spin on the same cores after each kernel. For that, the
 * few functions of OpenMP that it imports are replaced in its import table by those below. A library that imports others
 * keeps its own OpenMP, which is told the number of threads. */
#include "korch_runtime.h"

#include <pthread.h>
#ifndef _WIN32
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <link.h>
#endif

/* -- Libraries ------------------------------------------------------------------------------------------------------ */

static struct {
    const char *name;
    char *path;
} known[] = {{"dnnl", NULL}, {"onnxruntime", NULL}};

void korch_use_library(const char *name, const char *path) {
    for (int i = 0; i < 2; ++i) {
        if (strcmp(known[i].name, name) != 0) continue;
        free(known[i].path);
        known[i].path = strdup(path);
    }
}

void *korch_open_library(const char *name, const char *soname, char *error, size_t error_size) {
    const char *path = strcmp(name, known[0].name) == 0 ? known[0].path : known[1].path;
    void *found = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!found) found = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!found) snprintf(error, error_size, "%s can't be opened: %s", soname, dlerror());
    return found;
}

/* -- OpenMP on Korch's threads -------------------------------------------------------------------------------------- */

static _Thread_local korch_member region; /* that the thread has opened */
static _Thread_local korch_team *team;
static _Thread_local int nested; /* how many regions it has opened within a region: they have one thread */
static _Thread_local struct {
    long start, step, count, chunk, turn;
} loop;

typedef struct {
    void (*run)(void *);
    void *data;
} outlined;
static _Thread_local outlined opened;

static int run_outlined(void *given, korch_member *own) {
    (void)own;
    const outlined *const what = given;
    what->run(what->data);
    return 0;
}

static int omp_get_max_threads(void) { return korch_max_threads(); }
static int omp_get_thread_num(void) { return korch_inside() && !nested ? (int)korch_inside()->me : 0; }
static int omp_get_num_threads(void) { return korch_inside() && !nested ? (int)korch_inside()->threads : 1; }
static int omp_in_parallel(void) { return korch_inside() != NULL; }

/* The caller then runs its own part itself. */
static void GOMP_parallel_start(void (*run)(void *), void *data, unsigned threads) {
    if (korch_inside()) {
        ++nested;
        return;
    }
    opened = (outlined){run, data};
    team = korch_begin_region(threads ? (int)threads : korch_max_threads(), run_outlined, &opened, NULL, &region);
}

static void GOMP_parallel_end(void) {
    if (nested) --nested;
    else korch_end_region(team, &region);
}

static void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    GOMP_parallel_start(run, data, threads);
    run(data);
    GOMP_parallel_end();
}

static void GOMP_barrier(void) {
    korch_member *const own = korch_inside();
    if (own && !nested) own->meet(own);
}

static bool GOMP_loop_static_next(long *from, long *to) {
    const long me = omp_get_thread_num(), threads = omp_get_num_threads();
    long first, last;
    if (loop.chunk == 0) { /* one part for each thread */
        if (loop.turn++) return false;
        first = korch_share(loop.count, me, threads), last = korch_share(loop.count, me + 1, threads);
    } else {
        first = (loop.turn++ * threads + me) * loop.chunk;
        last = first + loop.chunk < loop.count ? first + loop.chunk : loop.count;
    }
    *from = loop.start + first * loop.step, *to = loop.start + last * loop.step;
    return first < last;
}

static bool GOMP_loop_static_start(long start, long end, long step, long chunk, long *from, long *to) {
    const long count = (end - start + step + (step > 0 ? -1 : 1)) / step;
    loop.start = start, loop.step = step, loop.count = count > 0 ? count : 0, loop.chunk = chunk, loop.turn = 0;
    return GOMP_loop_static_next(from, to);
}

static void GOMP_loop_end_nowait(void) {}

#define OWN(name) {#name, (void *)name}
static const struct {
    const char *name;
    void *own;
} replaced[] = {OWN(omp_get_max_threads), OWN(omp_get_thread_num), OWN(omp_get_num_threads), OWN(omp_in_parallel),
                OWN(GOMP_parallel_start), OWN(GOMP_parallel_end), OWN(GOMP_parallel), OWN(GOMP_barrier),
                OWN(GOMP_loop_static_start), OWN(GOMP_loop_static_next), OWN(GOMP_loop_end_nowait)};

static void (*set_threads)(int); /* of the library's own OpenMP, if it has kept that */

void korch_tell_threads(int threads) {
    if (set_threads) set_threads(threads);
}

#if defined(__linux__) && defined(__x86_64__)
/* The address for an imported function: null if it stays as it is; `is_known` is cleared if it is another of OpenMP. */
static void *replacement(const char *name, bool *is_known) {
    if (strncmp(name, "GOMP_", 5) != 0 && strncmp(name, "omp_", 4) != 0) return NULL;
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; ++i)
        if (strcmp(replaced[i].name, name) == 0) return replaced[i].own;
    *is_known = false;
    return NULL;
}

/* Return whether OpenMP's functions were replaced in a library's import table. */
static bool replace_openmp(void *library) {
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return false;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *rows = NULL;
    size_t size = 0;
    for (const ElfW(Dyn) *at = map->l_ld; at->d_tag != DT_NULL; ++at) {
        const ElfW(Addr) place = at->d_un.d_ptr < map->l_addr ? at->d_un.d_ptr + map->l_addr : at->d_un.d_ptr;
        if (at->d_tag == DT_SYMTAB) symbols = (const void *)place;
        else if (at->d_tag == DT_STRTAB) names = (const void *)place;
        else if (at->d_tag == DT_JMPREL) rows = (const void *)place;
        else if (at->d_tag == DT_PLTRELSZ) size = at->d_un.d_val;
    }
    if (!symbols || !names || !rows) return false;
    bool is_known = true, is_any = false;
    for (int turn = 0; turn < 2 && is_known; ++turn) { /* nothing is replaced if something is unknown */
        for (size_t i = 0; i < size / sizeof *rows; ++i) {
            void *const own = replacement(names + symbols[ELF64_R_SYM(rows[i].r_info)].st_name, &is_known);
            if (!own) continue;
            is_any = true;
            if (turn == 0) continue;
            void **const place = (void **)(map->l_addr + rows[i].r_offset);
            const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
            if (mprotect((void *)((uintptr_t)place & -page), page, PROT_READ | PROT_WRITE) != 0) return false;
            *place = own;
        }
    }
    return is_known && is_any;
}
#else
static bool replace_openmp(void *library) {
    (void)library;
    return false;
}
#endif

/* -- The library ---------------------------------------------------------------------------------------------------- */

typedef const void *md; /* a description of a tensor */

/* The functions that are used; `dnnl_` is left out of their names. */
#define FUNCTIONS(F) \
    F(engine_create, (void **, int, size_t)) \
    F(stream_create, (void **, void *, unsigned)) \
    F(memory_destroy, (void *)) \
    F(memory_create, (void **, md, void *, void *)) \
    F(memory_set_data_handle, (void *, void *)) \
    F(memory_desc_create_with_strides, (md *, int, const int64_t *, int, const int64_t *)) \
    F(memory_desc_create_with_tag, (md *, int, const int64_t *, int, int)) \
    F(memory_desc_destroy, (md)) \
    F(post_ops_create, (void **)) \
    F(post_ops_destroy, (void *)) \
    F(post_ops_append_binary, (void *, int, md)) \
    F(post_ops_append_eltwise, (void *, int, float, float)) \
    F(primitive_attr_create, (void **)) \
    F(primitive_attr_destroy, (void *)) \
    F(primitive_attr_set_scratchpad_mode, (void *, int)) \
    F(primitive_attr_set_post_ops, (void *, void *)) \
    F(primitive_desc_destroy, (void *)) \
    F(primitive_create, (void **, void *)) \
    F(primitive_destroy, (void *)) \
    F(primitive_execute, (void *, void *, int, const void *)) \
    F(convolution_forward_primitive_desc_create, (void **, void *, int, int, md, md, md, md, const int64_t *, \
                                                  const int64_t *, const int64_t *, const int64_t *, void *)) \
    F(deconvolution_forward_primitive_desc_create, (void **, void *, int, int, md, md, md, md, const int64_t *, \
                                                    const int64_t *, const int64_t *, const int64_t *, void *)) \
    F(matmul_primitive_desc_create, (void **, void *, md, md, md, md, void *)) \
    F(pooling_forward_primitive_desc_create, (void **, void *, int, int, md, md, const int64_t *, const int64_t *, \
                                              const int64_t *, const int64_t *, const int64_t *, void *)) \
    F(reorder_primitive_desc_create, (void **, md, void *, md, void *, void *))

#define DECLARE(name, types) static int (*name) types;
FUNCTIONS(DECLARE)
static md (*primitive_desc_query_md)(void *, int, int);
static size_t (*memory_desc_get_size)(md);

enum { OUT_OF_MEMORY = 1, CPU = 1, F32 = 3, USER_WORKSPACE = 1, FORWARD = 96, WORKSPACE_MD = 136, WORKSPACE = 80 };
static void *const ALLOCATE = (void *)(size_t)-1;

static void *engine, *stream; /* that all kernels share */
static char problem[600];
static void *library;

static void open_shared(void) {
    library = korch_open_library("dnnl", "libdnnl.so.3", problem, sizeof problem);
    if (!library) return;
    if (!replace_openmp(library)) set_threads = (void (*)(int))dlsym(library, "omp_set_num_threads");
    bool is_complete = true;
#define FIND(name, types) is_complete = (name = (int (*) types)dlsym(library, "dnnl_" #name)) && is_complete;
    FUNCTIONS(FIND)
    primitive_desc_query_md = (md (*)(void *, int, int))dlsym(library, "dnnl_primitive_desc_query_md");
    memory_desc_get_size = (size_t (*)(md))dlsym(library, "dnnl_memory_desc_get_size");
    if (!is_complete || !primitive_desc_query_md || !memory_desc_get_size) {
        snprintf(problem, sizeof problem, "this oneDNN is not of version 3");
    } else if (engine_create(&engine, CPU, 0) != 0 || stream_create(&stream, engine, 1) != 0) {
        snprintf(problem, sizeof problem, "oneDNN does not work here");
        stream = NULL;
    }
}

/* Open the library; return it, or null. For `korch.provider.onednn.api`, which asks it what it would run. */
KORCH_API void *korch_onednn_open(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_shared);
    return stream ? library : NULL;
}

/* -- Kernels -------------------------------------------------------------------------------------------------------- */

enum { MOST = 32 };
enum { CONVOLUTION, DECONVOLUTION, MATMUL, POOLING, REORDER };

/* A tensor in a buffer of the kernel: in the layout of a format tag, or with a stride in elements for each axis. */
typedef struct {
    int64_t buffer, argument, rank;
    const int64_t *dims;
    int64_t tag;
    const int64_t *strides;
} tensor;

/* A post-operation: on each element, or with another tensor. */
typedef struct {
    int64_t kind;
    float alpha, beta;
    const tensor *other;
} post;

/* A primitive; what it does not have is null. `korch.provider.onednn.source` prints it. */
typedef struct {
    int64_t kind, algorithm;
    const tensor *x, *w, *bias, *y;
    KORCH_TABLE(post) posts;
    const int64_t *strides, *window, *dilations, *begin, *end;
    int64_t workspace, workspace_bytes; /* the buffer of the scratch memory, and its size */
} call;

typedef struct {
    int number;
    void *memory;
} argument;

typedef struct {
    void *primitive;
    argument arguments[MOST];
    int64_t buffers[MOST];
    void *places[MOST];
    int count;
    void *own; /* a workspace, if the library needs more here than it reported at build time */

    /* The same primitive for one thread, created when it is first run: the code of a primitive depends on the number of
     * threads. It can't be created if `alone_desc` is null. */
    void *alone_desc, *alone, *alone_workspace;
} state;

/* What is needed while a primitive is created; the first failure is kept. */
typedef struct {
    const call *call;
    state *state;
    void *posts, *attributes;
    md tensors[MOST];
    int count;
    const char *failed;
    int status;
} build;

KORCH_API void korch_onednn_destroy(const call *call, void *given) {
    (void)call;
    state *const own = given;
    if (!own) return;
    for (int i = 0; i < own->count; ++i) memory_destroy(own->arguments[i].memory);
    if (own->primitive) primitive_destroy(own->primitive);
    if (own->alone) primitive_destroy(own->alone);
    if (own->alone_workspace) memory_destroy(own->alone_workspace);
    if (own->alone_desc) primitive_desc_destroy(own->alone_desc);
    free(own->own);
    free(own);
}

static void check(build *build, int status, const char *part) {
    if (status == 0 || build->failed) return;
    build->failed = part;
    build->status = status;
}

static void hold(state *own, int64_t buffer, int64_t number, void *memory) {
    own->arguments[own->count] = (argument){(int)number, memory};
    own->buffers[own->count++] = buffer;
}

static md describe(build *build, const tensor *tensor) {
    if (!tensor || build->count == MOST) return NULL;
    md desc = NULL;
    const int rank = (int)tensor->rank;
    check(build,
          tensor->strides ? memory_desc_create_with_strides(&desc, rank, tensor->dims, F32, tensor->strides)
                          : memory_desc_create_with_tag(&desc, rank, tensor->dims, F32, (int)tensor->tag), "tensor");
    void *memory = NULL;
    if (!build->failed) check(build, memory_create(&memory, desc, engine, NULL), "memory");
    hold(build->state, tensor->buffer, tensor->argument, memory);
    return build->tensors[build->count++] = desc;
}

/* Create a description of the primitive for the number of threads that OpenMP reports. */
static int create_desc(const build *build, const md *t, void **made) {
    const call *const c = build->call;
    const int algorithm = (int)c->algorithm;
    void *const more = build->attributes;
    switch (c->kind) {
    case CONVOLUTION:
        return convolution_forward_primitive_desc_create(made, engine, FORWARD, algorithm, t[0], t[1], t[2], t[3], c->strides,
                                                         c->dilations, c->begin, c->end, more);
    case DECONVOLUTION:
        return deconvolution_forward_primitive_desc_create(made, engine, FORWARD, algorithm, t[0], t[1], t[2], t[3],
                                                           c->strides, c->dilations, c->begin, c->end, more);
    case MATMUL: return matmul_primitive_desc_create(made, engine, t[0], t[1], t[2], t[3], more);
    case POOLING:
        return pooling_forward_primitive_desc_create(made, engine, FORWARD, algorithm, t[0], t[3], c->strides, c->window,
                                                     c->dilations, c->begin, c->end, more);
    default: return reorder_primitive_desc_create(made, t[0], engine, t[3], engine, more);
    }
}

static void add_workspace(build *build, void *made) {
    const md desc = primitive_desc_query_md(made, WORKSPACE_MD, 0);
    const size_t size = desc ? memory_desc_get_size(desc) : 0;
    if (size == 0) return;
    if ((int64_t)size > build->call->workspace_bytes) {
        build->state->own = korch_allocate((int64_t)size);
        if (!build->state->own) return check(build, OUT_OF_MEMORY, "workspace");
    }
    void *memory = NULL;
    check(build, memory_create(&memory, desc, engine, NULL), "workspace");
    hold(build->state, build->state->own ? -1 : build->call->workspace, WORKSPACE, memory);
}

static void create(build *build) {
    const call *const c = build->call;
    check(build, post_ops_create(&build->posts), "post-operations");
    check(build, primitive_attr_create(&build->attributes), "attributes");
    if (build->failed) return;
    check(build, primitive_attr_set_scratchpad_mode(build->attributes, USER_WORKSPACE), "attributes");
    const md tensors[] = {describe(build, c->x), describe(build, c->w), describe(build, c->bias), describe(build, c->y)};
    for (int64_t i = 0; i < c->posts.count && !build->failed; ++i) {
        const post *const post = &c->posts.rows[i];
        if (post->other)
            check(build, post_ops_append_binary(build->posts, (int)post->kind, describe(build, post->other)),
                  "binary operation");
        else check(build, post_ops_append_eltwise(build->posts, (int)post->kind, post->alpha, post->beta),
                   "elementwise operation");
    }
    check(build, primitive_attr_set_post_ops(build->attributes, build->posts), "attributes");
    static const char *const kinds[] = {"convolution", "transposed convolution", "matrix product", "pooling",
                                        "change of layout"};
    void *made = NULL;
    if (!build->failed) check(build, create_desc(build, tensors, &made), kinds[c->kind]);
    if (!build->failed && korch_max_threads() > 1) {
        const int before = korch_set_threads(1);
        if (create_desc(build, tensors, &build->state->alone_desc) != 0) build->state->alone_desc = NULL;
        korch_set_threads(before);
    }
    if (!build->failed) check(build, primitive_create(&build->state->primitive, made), "primitive");
    if (!build->failed) add_workspace(build, made);
    if (made) primitive_desc_destroy(made);
}

KORCH_API void *korch_onednn_create(const call *call, int threads, char *error, size_t error_size) {
    (void)threads;
    if (!korch_onednn_open()) {
        snprintf(error, error_size, "%s", problem);
        return NULL;
    }
    korch_tell_threads(korch_max_threads());
    build build = {.call = call, .state = calloc(1, sizeof(state))};
    if (!build.state) return NULL;
    create(&build);
    for (int i = 0; i < build.count; ++i) memory_desc_destroy(build.tensors[i]);
    if (build.posts) post_ops_destroy(build.posts);
    if (build.attributes) primitive_attr_destroy(build.attributes);
    if (!build.failed) return build.state;
    snprintf(error, error_size, "oneDNN refuses the %s (status %d)", build.failed, build.status);
    korch_onednn_destroy(call, build.state);
    return NULL;
}

/* Whether the primitive for one thread is to be run: there is one thread, and the primitive exists. A failed creation is not
 * tried again: the primitive for all threads is then run, as usual. */
static bool can_run_alone(state *own) {
    if (!own->alone_desc || korch_max_threads() != 1) return false;
    if (own->alone) return true;
    const md desc = primitive_desc_query_md(own->alone_desc, WORKSPACE_MD, 0);
    const bool has_workspace = desc && memory_desc_get_size(desc) != 0;
    if ((!has_workspace || memory_create(&own->alone_workspace, desc, engine, ALLOCATE) == 0) &&
        primitive_create(&own->alone, own->alone_desc) == 0)
        return true;
    primitive_desc_destroy(own->alone_desc);
    own->alone_desc = NULL;
    return false;
}

static int run_for_one(state *own) {
    argument arguments[MOST];
    int count = 0;
    for (int i = 0; i < own->count; ++i)
        if (own->arguments[i].number != WORKSPACE) arguments[count++] = own->arguments[i];
    if (own->alone_workspace) arguments[count++] = (argument){WORKSPACE, own->alone_workspace};
    return primitive_execute(own->alone, stream, count, arguments) != 0;
}

KORCH_API int korch_onednn_run(const call *call, void *given, void *const *buffers) {
    (void)call;
    state *const own = given;
    for (int i = 0; i < own->count; ++i) {
        void *const place = own->buffers[i] < 0 ? own->own : buffers[own->buffers[i]];
        if (place == own->places[i]) continue;
        memory_set_data_handle(own->arguments[i].memory, place);
        own->places[i] = place;
    }
    if (can_run_alone(own)) return run_for_one(own);
    return primitive_execute(own->primitive, stream, own->count, own->arguments) != 0;
}
