// Kernels ("parts") that run concurrently on subsets of the threads ("lanes"): each lane runs its parts one by one.
#pragma once

#include <stddef.h>

#include "korch_parts.h"
#include "korch_wait.h"

extern "C" void omp_set_num_threads(int);

namespace korch_concurrent {

using korch_parts::MOST;
using korch_parts::Part;

// A buffer of a part: one of the whole kernel's buffers, from a byte offset on.
struct Slot {
  int buffer;
  size_t offset;
};

// While an object exists, OpenMP reports one thread, so that libraries use only one while parts run or are created. This
// affects the calling thread only and, within a parallel region, no longer than the region.
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
  korch_parts::destroy(parts, PARTS, pointer);
}

template <int PARTS>
void* create(const Part (&parts)[PARTS], char* error, size_t error_size) {
  const OneThread one;
  return korch_parts::create(parts, PARTS, 1, error, error_size);
}

// Run the parts of a lane, parts[from] to parts[end - 1], one after another, as one of the lane's threads. `slot_count`
// is the number of all parts' slots.
inline int run_lane(const Part* parts, const Slot* slots, int slot_count, int from, int end,
                    int part_count, void* const* states, void* const* buffers, korch::Member own) {
  const OneThread one;
  int failed = 0;
  for (int i = from; i < end; ++i) {
    void* place[MOST];
    const int last = i + 1 < part_count ? parts[i + 1].first_slot : slot_count;
    for (int s = parts[i].first_slot; s < last; ++s)
      place[s - parts[i].first_slot] = static_cast<char*>(buffers[slots[s].buffer]) + slots[s].offset;
    if (parts[i].team != nullptr) failed |= parts[i].team(place, own);
    else if (own.me == 0) failed |= parts[i].run(states == nullptr ? nullptr : states[i], place);
    if (failed != 0 && own.threads == 1) break;  // otherwise the lane's other threads wait for this one
    if (i + 1 < end) own.meet();
  }
  return failed;
}

// Run a single lane of one thread in the calling thread.
template <int PARTS, int SLOTS>
int run_alone(const Part (&parts)[PARTS], const Slot (&slots)[SLOTS], void* state,
              void* const* buffers) {
  void* const* states = static_cast<void* const*>(state);
  return run_lane(parts, slots, SLOTS, 0, PARTS, PARTS, states, buffers, {});
}

// More than the number of barriers in a lane.
constexpr uint32_t MOST_TURNS = 1 << 16;

// Run all lanes concurrently, as one of the threads: lane l has the parts from ends[l - 1] to ends[l] - 1, and threads[l]
// threads. If there are fewer threads than needed, as in a nested region, each lane runs on one thread.
template <int PARTS, int SLOTS, int LANES>
int run_lanes(const Part (&parts)[PARTS], const Slot (&slots)[SLOTS], const int (&ends)[LANES],
              const int (&threads)[LANES], void* state, void* const* buffers, korch::Member& own) {
  void* const* states = static_cast<void* const*>(state);
  const auto run_it = [&](int lane, const korch::Member& seat) {
    return run_lane(parts, slots, SLOTS, lane == 0 ? 0 : ends[lane - 1], ends[lane], PARTS, states, buffers, seat);
  };
  int needed = 0, failed = 0;
  for (const int count : threads) needed += count;
  if (own.threads < needed) {
    for (int lane = int(own.me); lane < LANES; lane += int(own.threads)) failed |= run_it(lane, {});
    return failed;
  }
  for (int lane = 0, first = 0; lane < LANES; first += threads[lane++]) {
    if (own.me < first || own.me >= first + threads[lane]) continue;
    failed = run_it(lane, {own.me - first, threads[lane], own.meet_others, own.team, own.first + first, own.turn});
  }
  own.turn += MOST_TURNS;
  return failed;
}

// Run a kernel of lanes in a new parallel region. The region has as many threads as other kernels' regions: GCC's OpenMP
// would end the threads that a smaller region does not need, and create them again for the next one.
template <int THREADS, class F>
int run_region(F run) {
  korch::Count counts[THREADS];
  korch::Team team{counts, THREADS, korch::look_ns(THREADS)};
  int failed = 0;
#pragma omp parallel num_threads(THREADS) reduction(| : failed)
  {
    korch::Member own = korch::member(team, omp_get_thread_num(), omp_get_num_threads(), 0);
    failed |= run(own);
  }
  return failed;
}

}  // namespace korch_concurrent
