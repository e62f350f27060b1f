// Kernels ("parts") that run one after another, several times: the iterations of a loop. A state has two buffers; each
// iteration reads the one that the iteration before has written, and writes the other one.
#pragma once

#include <stddef.h>
#include <string.h>

#include "korch_parts.h"

#pragma GCC visibility push(hidden)

namespace korch_loop {

using korch_parts::MOST;
using korch_parts::Part;

constexpr int DATA = -1, NONE = -2;

// Memory: one of the whole kernel's buffers from a byte offset on, or the kernel's own data, or none.
struct Place {
  int buffer;
  size_t offset;
};

// A buffer of a part: a tensor of the iteration from a byte offset on; `each` bytes lie between those of two threads.
struct Slot {
  int tensor;
  size_t offset, each;
};

// A state: the tensors from and to which an iteration reads and writes it, its first and last buffers, and the two others.
struct State {
  int read, written;
  Place first, last, others;
  size_t size;
};

// A tensor that is a slice of a buffer, `size` bytes long; backward if the first iteration has the last slice.
struct Stream {
  int tensor;
  Place place;
  size_t size;
  bool is_backward;
};

// A tensor that is the same in all iterations.
struct Fixed {
  int tensor;
  Place place;
};

// A buffer whose `count` elements are equal.
struct Fill {
  Place place;
  size_t count;
  int size;
  unsigned char element[16];
};

// A tensor to which a part of another one is copied at the end of each iteration.
struct Copy {
  int to;
  Slot from;
  size_t size;
};

template <class T>
struct Table {
  const T* rows;
  int count;
  const T* begin() const { return rows; }
  const T* end() const { return rows + count; }
};

struct Loop {
  long trips;
  const unsigned char* data;
  Table<Part> parts;
  Table<Slot> slots;
  Table<State> states;
  Table<Stream> streams;
  Table<Fixed> fixed;
  Table<Fill> fills;
  Table<Copy> copies;
};

inline void destroy(const Loop& loop, void* created) {
  korch_parts::destroy(loop.parts.rows, loop.parts.count, created);
}

inline void* create(const Loop& loop, int threads, char* error, size_t error_size) {
  return korch_parts::create(loop.parts.rows, loop.parts.count, threads, error, error_size);
}

// Run all iterations as one of the threads. If `is_apart`, this is the only one, and parts may use threads of their own.
template <int TENSORS>
int run(const Loop& loop, void* created, void* const* buffers, korch::Member& own, bool is_apart) {
  char* at[TENSORS];
  const auto locate = [&](const Place& place) {
    char* const base = place.buffer == DATA ? reinterpret_cast<char*>(const_cast<unsigned char*>(loop.data))
                                            : static_cast<char*>(buffers[place.buffer]);
    return base + place.offset;
  };
  const auto slot_at = [&](const Slot& slot) { return at[slot.tensor] + slot.offset + own.me * slot.each; };
  for (const Fixed& fixed : loop.fixed) at[fixed.tensor] = locate(fixed.place);
  for (const Fill& fill : loop.fills)
    for (size_t i = 0; own.me == 0 && i < fill.count; ++i)
      memcpy(locate(fill.place) + i * fill.size, fill.element, fill.size);
  if (loop.fills.count != 0) own.meet();
  int failed = 0;
  for (long trip = 0; trip < loop.trips; ++trip) {
    for (const State& state : loop.states) {
      at[state.read] = trip == 0 ? locate(state.first) : at[state.written];
      const bool ends = trip + 1 == loop.trips && state.last.buffer != NONE;
      at[state.written] = ends ? locate(state.last) : locate(state.others) + (trip & 1) * state.size;
    }
    for (const Stream& stream : loop.streams)
      at[stream.tensor] = locate(stream.place) + stream.size * (stream.is_backward ? loop.trips - 1 - trip : trip);
    for (int i = 0; i < loop.parts.count; ++i) {
      const Part& part = loop.parts.rows[i];
      void* place[MOST];
      const int last = i + 1 < loop.parts.count ? loop.parts.rows[i + 1].first_slot : loop.slots.count;
      for (int s = part.first_slot; s < last; ++s) place[s - part.first_slot] = slot_at(loop.slots.rows[s]);
      if (part.team != nullptr && !is_apart) failed |= part.team(place, own);
      else if (own.me == 0) failed |= part.run(created == nullptr ? nullptr : static_cast<void**>(created)[i], place);
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

}  // namespace korch_loop

#pragma GCC visibility pop
