// Threads that run a kernel together. Each thread calls the kernel's function with its own `Member`, so that a kernel does
// not depend on where the threads come from: a region that the kernel opens itself, or a plan.
#pragma once

#include <stdint.h>

#include "korch_apart.h"

extern "C" {
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
void omp_set_num_threads(int);
}

#pragma GCC visibility push(hidden)

namespace korch {

struct Team;

// A thread's number among the threads that run a kernel, and how they synchronize.
struct Member {
  long me = 0, threads = 1;
  void (*meet_others)(Member&) = nullptr;
  Team* team = nullptr;  // this and `turn` are used by `korch_wait.h`
  uint32_t turn = 0;     // how many barriers the team's threads have passed

  // A barrier: wait for all threads. Their writes before it are visible afterwards.
  void meet() {
    if (threads > 1) meet_others(*this);
  }
};

// The first task of thread `me` if `tasks` are divided among `threads`; a thread beyond these gets an empty range.
inline long share(long tasks, long me, long threads) {
  if (me > threads) me = threads;
  return tasks / threads * me + (me < tasks % threads ? me : tasks % threads);
}

// The same for `count` coordinates that are divided in multiples of `unit`.
inline long share_units(long count, long unit, long me, long threads) {
  const long first = unit * share((count + unit - 1) / unit, me, threads);
  return first < count ? first : count;
}

// While an object exists, OpenMP reports one thread, so that libraries use only one. This affects the calling thread only
// and, within a parallel region, no longer than the region.
struct OneThread {
  const int before = omp_get_max_threads();
  OneThread() {
    if (before != 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before != 1) omp_set_num_threads(before);
  }
};

// Run a kernel's function in a new parallel region.
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
