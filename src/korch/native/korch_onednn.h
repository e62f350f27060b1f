// Support code for the kernels of the oneDNN provider: creates and runs one primitive with its post-operations.
#pragma once

#include <math.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "korch_team.h"

namespace korch_onednn {

constexpr int MOST = 32;

struct Dims {
  dnnl_dims_t values = {};
  int count = 0;
  template <typename... N>
  Dims(N... n) : values{static_cast<dnnl_dim_t>(n)...}, count(sizeof...(n)) {}
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

inline Device& device() {
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

inline void destroy(void* pointer) {
  State* state = static_cast<State*>(pointer);
  if (state == nullptr) return;
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
inline bool can_run_alone(State& state) {
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

inline int run_alone(State& state) {
  dnnl_exec_arg_t arguments[MOST];
  int count = 0;
  for (int i = 0; i < state.count; ++i)
    if (state.arguments[i].arg != DNNL_ARG_SCRATCHPAD) arguments[count++] = state.arguments[i];
  if (state.alone_workspace != nullptr)
    arguments[count++] = {DNNL_ARG_SCRATCHPAD, state.alone_workspace};
  return dnnl_primitive_execute(state.alone, device().stream, count, arguments) != dnnl_success;
}

inline int run(void* pointer, void* const* buffers) {
  State* state = static_cast<State*>(pointer);
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

  // A tensor in buffers[buffer], in the layout of a format tag.
  dnnl_memory_desc_t tensor(int buffer, int argument, const Dims& dims, dnnl_format_tag_t tag) {
    dnnl_memory_desc_t desc = nullptr;
    check(dnnl_memory_desc_create_with_tag(&desc, dims.count, dims.values, dnnl_f32, tag),
          "tensor");
    return add(buffer, argument, desc);
  }

  // A tensor in buffers[buffer], with a stride in elements for each axis.
  dnnl_memory_desc_t strided(int buffer, int argument, const Dims& dims, const Dims& strides) {
    dnnl_memory_desc_t desc = nullptr;
    check(dnnl_memory_desc_create_with_strides(&desc, dims.count, dims.values, dnnl_f32,
                                               strides.values), "tensor");
    return add(buffer, argument, desc);
  }

  // Scratch memory in buffers[buffer].
  void workspace(int buffer, size_t size_bytes) {
    workspace_ = buffer;
    workspace_bytes_ = size_bytes;
  }

  void eltwise(dnnl_alg_kind_t kind, float alpha, float beta) {
    check(dnnl_post_ops_append_eltwise(post_ops_, kind, alpha, beta), "elementwise operation");
  }

  void binary(dnnl_alg_kind_t kind, dnnl_memory_desc_t other) {
    check(dnnl_post_ops_append_binary(post_ops_, kind, other), "binary operation");
  }

  void* convolution(dnnl_memory_desc_t x, dnnl_memory_desc_t w, dnnl_memory_desc_t bias,
                    dnnl_memory_desc_t y, const Dims& strides, const Dims& dilations,
                    const Dims& begin, const Dims& end) {
    return make("convolution", [&](dnnl_primitive_desc_t* made) {
      return dnnl_convolution_forward_primitive_desc_create(
          made, device().engine, dnnl_forward_inference, dnnl_convolution_direct, x, w, bias, y,
          strides.values, dilations.values, begin.values, end.values, attributes_);
    });
  }

  void* deconvolution(dnnl_memory_desc_t x, dnnl_memory_desc_t w, dnnl_memory_desc_t bias,
                      dnnl_memory_desc_t y, const Dims& strides, const Dims& dilations,
                      const Dims& begin, const Dims& end) {
    return make("transposed convolution", [&](dnnl_primitive_desc_t* made) {
      return dnnl_deconvolution_forward_primitive_desc_create(
          made, device().engine, dnnl_forward_inference, dnnl_deconvolution_direct, x, w, bias, y,
          strides.values, dilations.values, begin.values, end.values, attributes_);
    });
  }

  void* matmul(dnnl_memory_desc_t a, dnnl_memory_desc_t b, dnnl_memory_desc_t bias,
               dnnl_memory_desc_t y) {
    return make("matrix product", [&](dnnl_primitive_desc_t* made) {
      return dnnl_matmul_primitive_desc_create(made, device().engine, a, b, bias, y, attributes_);
    });
  }

  void* pooling(dnnl_alg_kind_t kind, dnnl_memory_desc_t x, dnnl_memory_desc_t y,
                const Dims& strides, const Dims& kernel, const Dims& dilations, const Dims& begin,
                const Dims& end) {
    return make("pooling", [&](dnnl_primitive_desc_t* made) {
      return dnnl_pooling_forward_primitive_desc_create(
          made, device().engine, dnnl_forward_inference, kind, x, y, strides.values, kernel.values,
          dilations.values, begin.values, end.values, attributes_);
    });
  }

  void* reorder(dnnl_memory_desc_t x, dnnl_memory_desc_t y) {
    return make("change of layout", [&](dnnl_primitive_desc_t* made) {
      return dnnl_reorder_primitive_desc_create(
          made, x, device().engine, y, device().engine, attributes_);
    });
  }

 private:
  dnnl_memory_desc_t add(int buffer, int argument, dnnl_memory_desc_t desc) {
    dnnl_memory_t memory = nullptr;
    if (failed_ == nullptr) {
      check(dnnl_memory_create(&memory, desc, device().engine, DNNL_MEMORY_NONE), "memory");
    }
    hold(buffer, argument, memory);
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
  void* make(const char* part, F describe) {
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

}  // namespace korch_onednn
