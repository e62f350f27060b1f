// Kernels ("parts") that run one after another, several times: the iterations of a loop. A state has two buffers; each
// iteration reads the one that the iteration before has written, and writes the other one.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "korch_team.h"

namespace {

constexpr int MOST = 64;  // buffers of a part
constexpr int64_t DATA = -1, NONE = -2;

enum Mode : int64_t { ALONE, TEAM, APART };

// A kernel, and the number of its first slot. `create` and `destroy` are null if it has no state. `team` is null if it
// has no function that several threads call.
struct Part {
  int (*run)(void*, void* const*);
  int (*team)(void* const*, korch::Member&);
  void* (*create)(int, char*, size_t);
  void (*destroy)(void*);
  int64_t first_slot;
};

// Memory: one of the whole kernel's buffers from a byte offset on, or the kernel's own data, or none.
struct Place {
  int64_t buffer, offset;
};

// A buffer of a part: a tensor of the iteration from a byte offset on; `each` bytes lie between those of two threads.
struct Slot {
  int64_t tensor, offset, each;
};

// A state: the tensors from and to which an iteration reads and writes it, its first and last buffers, and the two others.
struct State {
  int64_t read, written;
  Place first, last, others;
  int64_t size;
};

// A tensor that is a slice of a buffer, `size` bytes long; backward if the first iteration has the last slice.
struct Stream {
  int64_t tensor;
  Place place;
  int64_t size, is_backward;
};

// A tensor that is the same in all iterations.
struct Fixed {
  int64_t tensor;
  Place place;
};

// A buffer whose `count` elements are equal.
struct Fill {
  Place place;
  int64_t count, size;
  unsigned char element[16];
};

// A tensor to which a part of another one is copied at the end of each iteration.
struct Copy {
  int64_t to;
  Slot from;
  int64_t size;
};

template <class T>
struct Table {
  int64_t count;
  const T* rows;
  const T* begin() const { return rows; }
  const T* end() const { return rows + count; }
};

struct Loop {
  Mode mode;
  int64_t threads, trips, tensors;
  int (*team)(void* const*, korch::Member&);  // the kernel's own function for several threads, or null
  const unsigned char* data;
  Table<Part> parts;
  Table<Slot> slots;
  Table<State> states;
  Table<Stream> streams;
  Table<Fixed> fixed;
  Table<Fill> fills;
  Table<Copy> copies;
};

void destroy(const Loop& loop, void** states) {
  for (int64_t i = 0; i < loop.parts.count; ++i)
    if (states[i] != nullptr) loop.parts.rows[i].destroy(states[i]);
  free(states);
}

// Run all iterations as one of the threads. If the mode is APART, this is the only one, and parts may use threads of
// their own.
int run_trips(const Loop& loop, void** created, void* const* buffers, korch::Member& own) {
  char** const at = static_cast<char**>(__builtin_alloca(loop.tensors * sizeof(char*)));
  const auto locate = [&](const Place& place) {
    char* const base = place.buffer == DATA ? reinterpret_cast<char*>(const_cast<unsigned char*>(loop.data))
                                            : static_cast<char*>(buffers[place.buffer]);
    return base + place.offset;
  };
  const auto slot_at = [&](const Slot& slot) { return at[slot.tensor] + slot.offset + own.me * slot.each; };
  for (const Fixed& fixed : loop.fixed) at[fixed.tensor] = locate(fixed.place);
  for (const Fill& fill : loop.fills)
    for (int64_t i = 0; own.me == 0 && i < fill.count; ++i)
      memcpy(locate(fill.place) + i * fill.size, fill.element, fill.size);
  if (loop.fills.count != 0) own.meet();
  int failed = 0;
  for (int64_t trip = 0; trip < loop.trips; ++trip) {
    for (const State& state : loop.states) {
      at[state.read] = trip == 0 ? locate(state.first) : at[state.written];
      const bool ends = trip + 1 == loop.trips && state.last.buffer != NONE;
      at[state.written] = ends ? locate(state.last) : locate(state.others) + (trip & 1) * state.size;
    }
    for (const Stream& stream : loop.streams)
      at[stream.tensor] = locate(stream.place) + stream.size * (stream.is_backward ? loop.trips - 1 - trip : trip);
    for (int64_t i = 0; i < loop.parts.count; ++i) {
      const Part& part = loop.parts.rows[i];
      void* place[MOST];
      const int64_t last = i + 1 < loop.parts.count ? loop.parts.rows[i + 1].first_slot : loop.slots.count;
      for (int64_t s = part.first_slot; s < last; ++s) place[s - part.first_slot] = slot_at(loop.slots.rows[s]);
      if (part.team != nullptr && loop.mode != APART) failed |= part.team(place, own);
      else if (own.me == 0) failed |= part.run(created == nullptr ? nullptr : created[i], place);
      if (failed != 0 && own.threads == 1) return failed;  // otherwise the other threads wait for this one
      own.meet();
    }
    if (loop.copies.count == 0) continue;
    for (const Copy& copy : loop.copies)
      if (own.me == 0) memcpy(at[copy.to], slot_at(copy.from), copy.size);
    own.meet();
  }
  return failed;
}

}  // namespace

#pragma GCC visibility push(hidden)

extern "C" {

// Return the states of all parts, made for a number of threads; null if one can't be made.
void* korch_loop_create(const Loop* loop, int threads, char* error, size_t error_size) {
  void** states = static_cast<void**>(calloc(loop->parts.count + 1, sizeof(void*)));
  for (int64_t i = 0; i < loop->parts.count; ++i) {
    const Part& part = loop->parts.rows[i];
    if (part.create == nullptr) continue;
    states[i] = part.create(threads, error, error_size);
    if (states[i] != nullptr) continue;
    destroy(*loop, states);
    return nullptr;
  }
  return states;
}

void korch_loop_destroy(const Loop* loop, void* states) {
  if (states != nullptr) destroy(*loop, static_cast<void**>(states));
}

int korch_loop_team(const Loop* loop, void* const* buffers, korch::Member* own) {
  return run_trips(*loop, nullptr, buffers, *own);
}

int korch_loop_run(const Loop* loop, void* states, void* const* buffers) {
  if (loop->mode == TEAM) return korch::run_region(int(loop->threads), loop->team, buffers);
  korch::Member own;
  return run_trips(*loop, static_cast<void**>(states), buffers, own);
}

}  // extern "C"

#pragma GCC visibility pop
