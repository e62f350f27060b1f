/* The kernels of the ONNX Runtime provider: creates and runs a session that contains one node.
 *
 * The library is opened when the first kernel is created. Its C interface is a table of function pointers. New versions
 * only append to the table, so the few functions needed are taken by position. */
#include "korch_runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

enum { API_VERSION = 11 }; /* the oldest table that has all of these positions */
enum {
    ERROR_MESSAGE = 2,
    CREATE_ENVIRONMENT = 3,
    CREATE_SESSION = 8,
    RUN = 9,
    CREATE_OPTIONS = 10,
    SET_THREADS = 24,
    SET_NODE_THREADS = 25,
    CREATE_TENSOR = 49,
    CREATE_MEMORY_INFO = 69,
    RELEASE_STATUS = 93,
    RELEASE_SESSION = 95,
    RELEASE_VALUE = 96,
    RELEASE_OPTIONS = 100,
    SET_OPTION = 130
};

typedef struct {
    int64_t buffer;
    int64_t element_type; /* ONNX's number of the type */
    int64_t size_bytes;
    int64_t rank;
    const int64_t *shape;
} tensor;

/* A node's model, and its tensors: inputs before outputs. */
typedef struct {
    const void *model;
    int64_t model_bytes;
    KORCH_TABLE(tensor) tensors;
    KORCH_TABLE(char *const) names; /* of the tensors */
    int64_t input_count;
} call;

/* The library, and the objects that all kernels of a process share. */
static void *const *table;
static void *environment, *memory;
static char problem[600];

#define CALL(position, types, ...) (((void *(*)types)table[position])(__VA_ARGS__))

static void release(int position, void *object) {
    if (object) ((void (*)(void *))table[position])(object);
}

/* Whether a status is a failure; its text goes to `text`. */
static bool failed(void *status, char *text, size_t text_size) {
    if (!status) return false;
    snprintf(text, text_size, "%s", ((const char *(*)(const void *))table[ERROR_MESSAGE])(status));
    release(RELEASE_STATUS, status);
    return true;
}

static char *library_path;

void korch_use_onnxruntime(const char *path) {
    free(library_path);
    library_path = strdup(path);
}

static void open_shared(void) {
    void *handle = library_path ? dlopen(library_path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!handle) handle = dlopen(KORCH_ONNXRUNTIME, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(problem, sizeof problem, KORCH_ONNXRUNTIME " can't be opened: %s", dlerror());
        return;
    }
    typedef struct {
        void *const *(*table)(uint32_t);
    } base;
    const base *(*const find)(void) = (const base *(*)(void))dlsym(handle, "OrtGetApiBase");
    table = find ? find()->table(API_VERSION) : NULL;
    if (!table) {
        snprintf(problem, sizeof problem, "this ONNX Runtime is too old");
        return;
    }
    const int errors_only = 3, arena = 1, ordinary = 0;
    if (failed(CALL(CREATE_ENVIRONMENT, (int, const char *, void **), errors_only, "korch", &environment), problem,
               sizeof problem) ||
        failed(CALL(CREATE_MEMORY_INFO, (int, int, void **), arena, ordinary, &memory), problem, sizeof problem))
        table = NULL;
}

/* A session, and the tensors of its last run: a tensor is only created again if its buffer has another address. */
typedef struct {
    void *session;
    pid_t process; /* the process that has the session's threads: a forked child has none of them */
    int threads;
    void **places, *values[];
} state;

KORCH_API void korch_onnxruntime_destroy(const call *call, void *given) {
    state *const own = given;
    if (!own) return;
    for (int64_t i = 0; i < call->tensors.count; ++i) release(RELEASE_VALUE, own->values[i]);
    /* In another process, this would wait forever for threads that do not exist. */
    if (own->process == getpid()) release(RELEASE_SESSION, own->session);
    free(own);
}

/* Create a session for this process. Return whether that failed. */
static bool open_session(const call *call, state *own, char *error, size_t size) {
    void *options = NULL;
    /* Its threads must sleep between runs, because all other kernels run on Korch's threads on the same cores. */
    const bool bad =
        failed(CALL(CREATE_OPTIONS, (void **), &options), error, size) ||
        failed(CALL(SET_THREADS, (void *, int), options, own->threads), error, size) ||
        failed(CALL(SET_NODE_THREADS, (void *, int), options, 1), error, size) ||
        failed(CALL(SET_OPTION, (void *, const char *, const char *), options, "session.intra_op.allow_spinning", "0"),
               error, size) ||
        failed(CALL(CREATE_SESSION, (void *, const void *, size_t, void *, void **), environment, call->model,
                    (size_t)call->model_bytes, options, &own->session), error, size);
    release(RELEASE_OPTIONS, options);
    own->process = getpid();
    return bad;
}

KORCH_API void *korch_onnxruntime_create(const call *call, int threads, char *error, size_t error_size) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_shared);
    if (!table) {
        snprintf(error, error_size, "%s", problem);
        return NULL;
    }
    state *const own = calloc(1, sizeof *own + 2 * (size_t)call->tensors.count * sizeof(void *));
    if (!own) return NULL;
    own->threads = threads;
    own->places = own->values + call->tensors.count;
    if (!open_session(call, own, error, error_size)) return own;
    korch_onnxruntime_destroy(call, own);
    return NULL;
}

KORCH_API int korch_onnxruntime_run(const call *call, void *given, void *const *buffers) {
    state *const own = given;
    char text[200];
    if (own->process != getpid() && open_session(call, own, text, sizeof text)) return 1;
    for (int64_t i = 0; i < call->tensors.count; ++i) {
        const tensor *const tensor = &call->tensors.rows[i];
        void *const place = buffers[tensor->buffer];
        if (own->values[i] && own->places[i] == place) continue;
        release(RELEASE_VALUE, own->values[i]);
        own->values[i] = NULL;
        if (failed(CALL(CREATE_TENSOR, (void *, void *, size_t, const int64_t *, size_t, int, void **), memory, place,
                        (size_t)tensor->size_bytes, tensor->shape, (size_t)tensor->rank, (int)tensor->element_type,
                        &own->values[i]), text, sizeof text))
            return 1;
        own->places[i] = place;
    }
    const size_t inputs = (size_t)call->input_count, outputs = (size_t)call->tensors.count - inputs;
    const char *const *const names = call->names.rows;
    return failed(CALL(RUN, (void *, void *, const char *const *, void **, size_t, const char *const *, size_t, void **),
                       own->session, NULL, names, own->values, inputs, names + inputs, outputs, own->values + inputs),
                  text, sizeof text);
}
