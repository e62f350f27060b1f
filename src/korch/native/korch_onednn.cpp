// Support code for the kernels of the oneDNN provider: creates and runs one primitive with its post-operations.

#include <math.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "korch_team.h"

namespace {

constexpr int MOST = 32;

// The constants of the library's interface that `korch.provider.onednn.source` uses by number.
static_assert(DNNL_ARG_SRC == 1 && DNNL_ARG_DST == 17 && DNNL_ARG_WEIGHTS == 33 && DNNL_ARG_BIAS == 41 &&
              DNNL_ARG_SRC_1 == 2 && DNNL_ARG_ATTR_MULTIPLE_POST_OP(1) == 2 * 32768);

enum Kind : int64_t { CONVOLUTION, DECONVOLUTION, MATMUL, POOLING, REORDER };

// A tensor in a buffer of the kernel: in the layout of a format tag, or with a stride in elements for each axis.
struct Tensor {
  int64_t buffer, argument, rank;
  const int64_t* dims;
  int64_t tag;
  const int64_t* strides;
};

// A post-operation: on each element, or with another tensor.
struct Post {
  int64_t kind;
  float alpha, beta;
  const Tensor* other;
};

// A primitive; what it does not have is null.
struct Call {
  Kind kind;
  int64_t algorithm;
  const Tensor *x, *w, *bias, *y;
  int64_t post_count;
  const Post* posts;
  const int64_t *strides, *window, *dilations, *begin, *end;
  int64_t workspace, workspace_bytes;  // the buffer of the scratch memory, and its size
};

// The engine and the stream that all kernels of a library share.
struct Device {
  dnnl_engine_t engine = nullptr;
  dnnl_stream_t stream = nullptr;
  Device() {
    if (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success) return;
    dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
  }
  ~Device() {
    if (stream != nullptr) dnnl_stream_destroy(stream);
    if (engine != nullptr) dnnl_engine_destroy(engine);
  }
};

Device& device() {
  static Device shared;
  return shared;
}

struct State {
  dnnl_primitive_t primitive = nullptr;
  dnnl_exec_arg_t arguments[MOST];
  int buffers[MOST];
  void* places[MOST] = {};
  int count = 0;
  void* own = nullptr;  // a workspace, if the library needs more here than it reported at build time

  // The same primitive for one thread, created when it is first run: the code of a primitive depends on the
  // number of threads. It can't be created if `alone_desc` is null.
  dnnl_primitive_desc_t alone_desc = nullptr;
  dnnl_primitive_t alone = nullptr;
  dnnl_memory_t alone_workspace = nullptr;
};

void destroy(State* state) {
  for (int i = 0; i < state->count; ++i) dnnl_memory_destroy(state->arguments[i].memory);
  if (state->primitive != nullptr) dnnl_primitive_destroy(state->primitive);
  if (state->alone != nullptr) dnnl_primitive_destroy(state->alone);
  if (state->alone_workspace != nullptr) dnnl_memory_destroy(state->alone_workspace);
  if (state->alone_desc != nullptr) dnnl_primitive_desc_destroy(state->alone_desc);
  free(state->own);
  delete state;
}

// Whether the primitive for one thread is to be run: OpenMP is set to one thread, and the primitive exists. A failed
// creation is not tried again: the primitive for all threads is then run, as usual.
bool can_run_alone(State& state) {
  if (state.alone_desc == nullptr || omp_get_max_threads() != 1) return false;
  if (state.alone != nullptr) return true;
  const_dnnl_memory_desc_t desc =
      dnnl_primitive_desc_query_md(state.alone_desc, dnnl_query_scratchpad_md, 0);
  const bool has_workspace = desc != nullptr && dnnl_memory_desc_get_size(desc) != 0;
  if ((!has_workspace || dnnl_memory_create(&state.alone_workspace, desc, device().engine,
                                            DNNL_MEMORY_ALLOCATE) == dnnl_success) &&
      dnnl_primitive_create(&state.alone, state.alone_desc) == dnnl_success) {
    return true;
  }
  dnnl_primitive_desc_destroy(state.alone_desc);
  state.alone_desc = nullptr;
  return false;
}

int run_alone(State& state) {
  dnnl_exec_arg_t arguments[MOST];
  int count = 0;
  for (int i = 0; i < state.count; ++i)
    if (state.arguments[i].arg != DNNL_ARG_SCRATCHPAD) arguments[count++] = state.arguments[i];
  if (state.alone_workspace != nullptr)
    arguments[count++] = {DNNL_ARG_SCRATCHPAD, state.alone_workspace};
  return dnnl_primitive_execute(state.alone, device().stream, count, arguments) != dnnl_success;
}

int run(State* state, void* const* buffers) {
  for (int i = 0; i < state->count; ++i) {
    const int buffer = state->buffers[i];
    void* place = buffer < 0 ? state->own : buffers[buffer];
    if (place == state->places[i]) continue;
    dnnl_memory_set_data_handle(state->arguments[i].memory, place);
    state->places[i] = place;
  }
  if (can_run_alone(*state)) return run_alone(*state);
  return dnnl_primitive_execute(state->primitive, device().stream, state->count,
                                state->arguments) != dnnl_success;
}

// Collects the parts of a primitive; the first failure is kept and reported at the end.
class Builder {
 public:
  Builder(char* error, size_t error_size) : error_(error), error_size_(error_size) {
    check(dnnl_post_ops_create(&post_ops_), "post-operations");
    check(dnnl_primitive_attr_create(&attributes_), "attributes");
    check(dnnl_primitive_attr_set_scratchpad_mode(attributes_, dnnl_scratchpad_mode_user),
          "attributes");
    if (device().stream == nullptr) check(dnnl_runtime_error, "engine");
  }

  State* create(const Call& call) {
    const dnnl_memory_desc_t x = tensor(call.x), w = tensor(call.w), bias = tensor(call.bias), y = tensor(call.y);
    for (int64_t i = 0; i < call.post_count; ++i) {
      const Post& post = call.posts[i];
      const dnnl_alg_kind_t kind = dnnl_alg_kind_t(post.kind);
      if (post.other != nullptr)
        check(dnnl_post_ops_append_binary(post_ops_, kind, tensor(post.other)), "binary operation");
      else check(dnnl_post_ops_append_eltwise(post_ops_, kind, post.alpha, post.beta), "elementwise operation");
    }
    workspace_ = int(call.workspace), workspace_bytes_ = size_t(call.workspace_bytes);
    const dnnl_engine_t engine = device().engine;
    const dnnl_alg_kind_t algorithm = dnnl_alg_kind_t(call.algorithm);
    const auto forward = dnnl_forward_inference;
    switch (call.kind) {
      case CONVOLUTION:
        return make("convolution", [&](dnnl_primitive_desc_t* made) {
          return dnnl_convolution_forward_primitive_desc_create(made, engine, forward, algorithm, x, w, bias, y, call.strides,
                                                                call.dilations, call.begin, call.end, attributes_);
        });
      case DECONVOLUTION:
        return make("transposed convolution", [&](dnnl_primitive_desc_t* made) {
          return dnnl_deconvolution_forward_primitive_desc_create(made, engine, forward, algorithm, x, w, bias, y,
                                                                  call.strides, call.dilations, call.begin, call.end,
                                                                  attributes_);
        });
      case MATMUL:
        return make("matrix product", [&](dnnl_primitive_desc_t* made) {
          return dnnl_matmul_primitive_desc_create(made, engine, x, w, bias, y, attributes_);
        });
      case POOLING:
        return make("pooling", [&](dnnl_primitive_desc_t* made) {
          return dnnl_pooling_forward_primitive_desc_create(made, engine, forward, algorithm, x, y, call.strides,
                                                            call.window, call.dilations, call.begin, call.end, attributes_);
        });
      case REORDER:
        return make("change of layout", [&](dnnl_primitive_desc_t* made) {
          return dnnl_reorder_primitive_desc_create(made, x, engine, y, engine, attributes_);
        });
    }
    return nullptr;
  }

 private:
  dnnl_memory_desc_t tensor(const Tensor* tensor) {
    if (tensor == nullptr) return nullptr;
    dnnl_memory_desc_t desc = nullptr;
    const int rank = int(tensor->rank);
    check(tensor->strides != nullptr
              ? dnnl_memory_desc_create_with_strides(&desc, rank, tensor->dims, dnnl_f32, tensor->strides)
              : dnnl_memory_desc_create_with_tag(&desc, rank, tensor->dims, dnnl_f32, dnnl_format_tag_t(tensor->tag)),
          "tensor");
    dnnl_memory_t memory = nullptr;
    if (failed_ == nullptr) {
      check(dnnl_memory_create(&memory, desc, device().engine, DNNL_MEMORY_NONE), "memory");
    }
    hold(int(tensor->buffer), int(tensor->argument), memory);
    return descs_[descs_count_++] = desc;
  }

  void hold(int buffer, int argument, dnnl_memory_t memory) {
    State& state = *state_;
    state.arguments[state.count] = {argument, memory};
    state.buffers[state.count] = buffer;
    ++state.count;
  }

  void add_workspace() {
    const_dnnl_memory_desc_t desc =
        dnnl_primitive_desc_query_md(made_, dnnl_query_scratchpad_md, 0);
    const size_t size_bytes = desc != nullptr ? dnnl_memory_desc_get_size(desc) : 0;
    if (size_bytes == 0) return;
    if (size_bytes > workspace_bytes_) {
      state_->own = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
      if (state_->own == nullptr) return check(dnnl_out_of_memory, "workspace");
    }
    dnnl_memory_t memory = nullptr;
    check(dnnl_memory_create(&memory, desc, device().engine, DNNL_MEMORY_NONE), "workspace");
    hold(state_->own != nullptr ? -1 : workspace_, DNNL_ARG_SCRATCHPAD, memory);
  }

  // `describe` creates a primitive descriptor for the number of threads that OpenMP reports.
  template <class F>
  State* make(const char* part, F describe) {
    check(dnnl_primitive_attr_set_post_ops(attributes_, post_ops_), "attributes");
    if (failed_ == nullptr) check(describe(&made_), part);
    if (failed_ == nullptr && omp_get_max_threads() > 1) {
      const korch::OneThread one;
      if (describe(&state_->alone_desc) != dnnl_success) state_->alone_desc = nullptr;
    }
    if (failed_ == nullptr) check(dnnl_primitive_create(&state_->primitive, made_), "primitive");
    if (failed_ == nullptr) add_workspace();
    if (made_ != nullptr) dnnl_primitive_desc_destroy(made_);
    for (int i = 0; i < descs_count_; ++i) dnnl_memory_desc_destroy(descs_[i]);
    dnnl_post_ops_destroy(post_ops_);
    dnnl_primitive_attr_destroy(attributes_);
    if (failed_ == nullptr) return state_;
    snprintf(error_, error_size_, "oneDNN refuses the %s (status %d)", failed_, status_);
    destroy(state_);
    return nullptr;
  }

  void check(dnnl_status_t status, const char* part) {
    if (status != dnnl_success && failed_ == nullptr) {
      failed_ = part;
      status_ = status;
    }
  }

  char* error_;
  size_t error_size_;
  State* state_ = new State();
  dnnl_post_ops_t post_ops_ = nullptr;
  dnnl_primitive_attr_t attributes_ = nullptr;
  dnnl_primitive_desc_t made_ = nullptr;
  dnnl_memory_desc_t descs_[MOST];
  int descs_count_ = 0;
  int workspace_ = -1;
  size_t workspace_bytes_ = 0;
  const char* failed_ = nullptr;
  int status_ = 0;
};

}  // namespace

#pragma GCC visibility push(hidden)

extern "C" {

void* korch_onednn_create(const Call* call, int, char* error, size_t error_size) {
  return Builder(error, error_size).create(*call);
}

int korch_onednn_run(const Call*, void* state, void* const* buffers) {
  return run(static_cast<State*>(state), buffers);
}

void korch_onednn_destroy(const Call*, void* state) {
  if (state != nullptr) destroy(static_cast<State*>(state));
}

}  // extern "C"

#pragma GCC visibility pop
