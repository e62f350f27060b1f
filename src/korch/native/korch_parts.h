// Kernels ("parts") that another kernel runs, in each iteration of a loop (`korch_loop.h`).
#pragma once

#include <stddef.h>

#include "korch_team.h"

#pragma GCC visibility push(hidden)

namespace korch_parts {

constexpr int MOST = 64;  // buffers of a part

// A kernel, and the number of its first slot. `create` and `destroy` are null if it has no state. `team` is null if it
// has no function that several threads call.
struct Part {
  int (*run)(void*, void* const*);
  int (*team)(void* const*, korch::Member&);
  void* (*create)(int, char*, size_t);
  void (*destroy)(void*);
  int first_slot;
};

inline void destroy(const Part* parts, int count, void* pointer) {
  void** states = static_cast<void**>(pointer);
  if (states == nullptr) return;
  for (int i = 0; i < count; ++i)
    if (states[i] != nullptr) parts[i].destroy(states[i]);
  delete[] states;
}

// Return the states of all parts, made for a number of threads; null if one can't be made.
inline void* create(const Part* parts, int count, int threads, char* error, size_t error_size) {
  void** states = new void*[count]();
  for (int i = 0; i < count; ++i) {
    if (parts[i].create == nullptr) continue;
    states[i] = parts[i].create(threads, error, error_size);
    if (states[i] != nullptr) continue;
    destroy(parts, count, states);
    return nullptr;
  }
  return states;
}

}  // namespace korch_parts

#pragma GCC visibility pop
