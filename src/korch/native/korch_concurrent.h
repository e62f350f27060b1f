// Kernels that were built for a share of the threads: each lane runs some, one after the other.
#pragma once

#include <stddef.h>

extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

namespace korch_concurrent {

constexpr int MOST = 64;  // buffers of a part

// A kernel, and where its slots begin; without state it is neither created nor destroyed.
struct Part {
  int (*run)(void*, void* const*);
  void* (*create)(int, char*, size_t);
  void (*destroy)(void*);
  int first_slot;
};

// A buffer of a part: one of the whole kernel's, from a byte on.
struct Slot {
  int buffer;
  size_t offset;
};

// What a library that looks for threads finds while parts run or are created: one. It counts for
// the calling thread alone, and where this is a task of a parallel region, no longer than the task.
struct OneThread {
  const int before = omp_get_max_threads();
  OneThread() {
    if (before != 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before != 1) omp_set_num_threads(before);
  }
};

template <int PARTS>
void destroy(const Part (&parts)[PARTS], void* pointer) {
  void** states = static_cast<void**>(pointer);
  if (states == nullptr) return;
  for (int i = 0; i < PARTS; ++i)
    if (states[i] != nullptr) parts[i].destroy(states[i]);
  delete[] states;
}

template <int PARTS>
void* create(const Part (&parts)[PARTS], char* error, size_t error_size) {
  const OneThread one;
  void** states = new void*[PARTS]();
  for (int i = 0; i < PARTS; ++i) {
    if (parts[i].create == nullptr) continue;
    states[i] = parts[i].create(1, error, error_size);
    if (states[i] != nullptr) continue;
    destroy(parts, states);
    return nullptr;
  }
  return states;
}

// Run parts[from] to parts[end - 1], one after the other. `slots` ends where the last part's do.
inline int run_lane(const Part* parts, const Slot* slots, int slot_count, int from, int end,
                    int part_count, void* const* states, void* const* buffers) {
  const OneThread one;
  for (int i = from; i < end; ++i) {
    void* own[MOST];
    const int last = i + 1 < part_count ? parts[i + 1].first_slot : slot_count;
    for (int s = parts[i].first_slot; s < last; ++s)
      own[s - parts[i].first_slot] = static_cast<char*>(buffers[slots[s].buffer]) + slots[s].offset;
    if (parts[i].run(states == nullptr ? nullptr : states[i], own) != 0) return 1;
  }
  return 0;
}

// Run a single lane of one thread: no other is started.
template <int PARTS, int SLOTS>
int run_alone(const Part (&parts)[PARTS], const Slot (&slots)[SLOTS], void* state,
              void* const* buffers) {
  void* const* states = static_cast<void* const*>(state);
  return run_lane(parts, slots, SLOTS, 0, PARTS, PARTS, states, buffers);
}

}  // namespace korch_concurrent
