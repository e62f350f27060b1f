// Threads that run a kernel together. Each calls the kernel's function with a place of its own, so a kernel says
// nothing of where threads come from: they are those of a region that it opens itself, of a plan, or of a lane.
#pragma once

#include <stdint.h>

#include "korch_apart.h"

extern "C" {
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
}

#pragma GCC visibility push(hidden)

namespace korch {

struct Team;

// A thread's place among those that run a kernel.
struct Member {
  long me = 0, threads = 1;
  void (*meet_others)(Member&) = nullptr;
  Team* team = nullptr;  // the rest is of `korch_wait.h`
  long first = 0;        // the place of the first of them in the team
  uint32_t turn = 0;     // how often threads of the team have met

  // Wait until all have come. What they wrote before is visible then.
  void meet() {
    if (threads > 1) meet_others(*this);
  }
};

// Where the part of a thread begins if threads share some tasks; one that is not needed has none.
inline long share(long tasks, long me, long threads) {
  if (me > threads) me = threads;
  return tasks / threads * me + (me < tasks % threads ? me : tasks % threads);
}

// The same for a number of coordinates, of which `unit` go together.
inline long share_units(long count, long unit, long me, long threads) {
  const long first = unit * share((count + unit - 1) / unit, me, threads);
  return first < count ? first : count;
}

// Run a kernel's function in a region of its own.
inline int run_region(int threads, int (*run)(void* const*, Member&), void* const* buffers) {
  int failed = 0;
  const Leader leader(threads);
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    Member own;
    own.me = omp_get_thread_num(), own.threads = omp_get_num_threads();
    if (own.me != 0) leader.leave_core(own.me);
    own.meet_others = [](Member&) {
#pragma omp barrier
    };
    failed |= run(buffers, own);
  }
  return failed;
}

}  // namespace korch

#pragma GCC visibility pop
