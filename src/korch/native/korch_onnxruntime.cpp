// Support code for the kernels of the ONNX Runtime provider: creates and runs a session that contains one node.
//
// The library is opened when the first kernel is created. Its C interface is a table of function pointers.
// New versions only append to the table, so the few functions needed are taken by position.

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace {

constexpr int API_VERSION = 11;  // the oldest table that has all of these positions
constexpr int ERROR_MESSAGE = 2, CREATE_ENVIRONMENT = 3, CREATE_SESSION = 8, RUN = 9;
constexpr int CREATE_OPTIONS = 10, SET_THREADS = 24, SET_NODE_THREADS = 25, CREATE_TENSOR = 49;
constexpr int CREATE_MEMORY_INFO = 69, RELEASE_STATUS = 93, RELEASE_SESSION = 95;
constexpr int RELEASE_VALUE = 96, RELEASE_OPTIONS = 100, SET_OPTION = 130;

struct Tensor {
  const char* name;
  int64_t buffer;
  int64_t element_type;  // ONNX's number of the type
  int64_t size_bytes;
  int64_t rank;
  const int64_t* shape;
};

// A node's model, and its tensors: inputs before outputs.
struct Call {
  const void* model;
  int64_t model_bytes;
  int64_t count;
  const Tensor* tensors;
  int64_t input_count;
};

// The library, and the objects that all kernels of a process share.
struct Library {
  void* const* table = nullptr;
  void* environment = nullptr;
  void* memory = nullptr;
  char error[400] = "";

  template <typename... A>
  void* call(int position, A... arguments) const {
    return reinterpret_cast<void* (*)(A...)>(table[position])(arguments...);
  }

  // Whether a status is a failure; its text goes to `text`.
  bool failed(void* status, char* text, size_t text_size) const {
    if (status == nullptr) return false;
    auto message = reinterpret_cast<const char* (*)(const void*)>(table[ERROR_MESSAGE]);
    snprintf(text, text_size, "%s", message(status));
    release(RELEASE_STATUS, status);
    return true;
  }

  void release(int position, void* object) const {
    if (object != nullptr) reinterpret_cast<void (*)(void*)>(table[position])(object);
  }

  Library() {
    const char* path = getenv("KORCH_ONNXRUNTIME_LIBRARY");
    void* handle = path != nullptr && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (handle == nullptr) handle = dlopen("libonnxruntime.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) handle = dlopen("libonnxruntime.so", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      snprintf(error, sizeof error, "ONNX Runtime can't be opened (%s); set "
               "KORCH_ONNXRUNTIME_LIBRARY to its libonnxruntime.so", dlerror());
      return;
    }
    struct Base { void* const* (*table)(uint32_t); const char* (*version)(); };
    auto base = reinterpret_cast<const Base* (*)()>(dlsym(handle, "OrtGetApiBase"));
    table = base != nullptr ? base()->table(API_VERSION) : nullptr;
    if (table == nullptr) {
      snprintf(error, sizeof error, "this ONNX Runtime is too old");
      return;
    }
    const int errors_only = 3, arena = 1, ordinary = 0;
    if (failed(call(CREATE_ENVIRONMENT, errors_only, "korch", &environment), error, sizeof error) ||
        failed(call(CREATE_MEMORY_INFO, arena, ordinary, &memory), error, sizeof error)) {
      table = nullptr;
    }
  }
};

const Library& library() {
  static const Library shared;
  return shared;
}

// A session, and the tensors of its last run: a tensor is only created again if its buffer has another address.
struct State {
  void* session = nullptr;
  pid_t process = 0;  // the process that has the session's threads: a forked child has none of them
  const Call* call = nullptr;
  int threads = 1;
  void** values = nullptr;
  void** places = nullptr;
  const char** names = nullptr;
};

void destroy(State* state) {
  for (int i = 0; i < state->call->count; ++i) library().release(RELEASE_VALUE, state->values[i]);
  // In another process, this would wait forever for threads that do not exist.
  if (state->process == getpid()) library().release(RELEASE_SESSION, state->session);
  free(state->values);
  free(state->places);
  free(state->names);
  delete state;
}

// Create a session for this process. Return whether that failed.
bool open_session(State* state, char* error, size_t error_size) {
  const Library& ort = library();
  void* options = nullptr;
  // Its threads must sleep between runs, because all other kernels run on OpenMP's threads on the same cores.
  const bool bad =
      ort.failed(ort.call(CREATE_OPTIONS, &options), error, error_size) ||
      ort.failed(ort.call(SET_THREADS, options, state->threads), error, error_size) ||
      ort.failed(ort.call(SET_NODE_THREADS, options, 1), error, error_size) ||
      ort.failed(ort.call(SET_OPTION, options, "session.intra_op.allow_spinning", "0"), error,
                 error_size) ||
      ort.failed(ort.call(CREATE_SESSION, ort.environment, state->call->model, size_t(state->call->model_bytes),
                          options, &state->session), error, error_size);
  ort.release(RELEASE_OPTIONS, options);
  state->process = getpid();
  return bad;
}

int run(State* state, void* const* buffers) {
  const Library& ort = library();
  const Call& call = *state->call;
  char text[200];
  if (state->process != getpid() && open_session(state, text, sizeof text)) return 1;
  for (int64_t i = 0; i < call.count; ++i) {
    const Tensor& tensor = call.tensors[i];
    void* place = buffers[tensor.buffer];
    if (state->values[i] != nullptr && state->places[i] == place) continue;
    ort.release(RELEASE_VALUE, state->values[i]);
    state->values[i] = nullptr;
    void* status = ort.call(CREATE_TENSOR, ort.memory, place, size_t(tensor.size_bytes), tensor.shape,
                            size_t(tensor.rank), int(tensor.element_type), &state->values[i]);
    if (ort.failed(status, text, sizeof text)) return 1;
    state->places[i] = place;
  }
  const size_t inputs = call.input_count, outputs = call.count - inputs;
  void* no_options = nullptr;
  void* status = ort.call(RUN, state->session, no_options, state->names, state->values, inputs,
                          state->names + inputs, outputs, state->values + inputs);
  return ort.failed(status, text, sizeof text);
}

}  // namespace

#pragma GCC visibility push(hidden)

extern "C" {

// The call must outlive the state.
void* korch_onnxruntime_create(const Call* call, int threads, char* error, size_t error_size) {
  const Library& ort = library();
  if (ort.table == nullptr) {
    snprintf(error, error_size, "%s", ort.error);
    return nullptr;
  }
  State* state = new State();
  state->call = call;
  state->values = static_cast<void**>(calloc(call->count + 1, sizeof(void*)));
  state->places = static_cast<void**>(calloc(call->count + 1, sizeof(void*)));
  state->names = static_cast<const char**>(calloc(call->count + 1, sizeof(char*)));
  for (int64_t i = 0; i < call->count; ++i) state->names[i] = call->tensors[i].name;
  state->threads = threads;
  if (!open_session(state, error, error_size)) return state;
  destroy(state);
  return nullptr;
}

int korch_onnxruntime_run(const Call*, void* state, void* const* buffers) {
  return run(static_cast<State*>(state), buffers);
}

void korch_onnxruntime_destroy(const Call*, void* state) {
  if (state != nullptr) destroy(static_cast<State*>(state));
}

}  // extern "C"

#pragma GCC visibility pop
