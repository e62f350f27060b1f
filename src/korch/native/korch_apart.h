// Keeps the other threads of a parallel region off the core of the thread that opens the region.
//
// After a thread has slept for some milliseconds, Linux may wake it on the core of the thread that wakes it, although
// other cores are idle. Both threads then share one core, each spinning while it waits for the other, until the system
// moves one of them. This took 4 to 9 ms on two cores, for a plan that runs in 0.06 ms.
#pragma once

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#pragma GCC visibility push(hidden)

namespace korch {

#ifdef __linux__

// The other threads of a thread's parallel regions, by the system's thread ids, and the core that they were moved off.
struct Others {
  static constexpr long MOST = 256;
  int core = -1;
  pid_t threads[MOST] = {};
};

inline thread_local Others others;
inline thread_local pid_t own_number = 0;

// The thread that opens a parallel region, and its core. If there are at least as many cores as threads, the other
// threads may run on all cores that this thread may use except the one it runs on. When this thread has moved to
// another core, their affinity is changed before the region starts, because they could otherwise be woken on this core.
class Leader {
 public:
  explicit Leader(int threads) : threads_(threads), core_(sched_getcpu()), leader_(pthread_self()), others_(&others) {
    if (others_->core == core_) return;
    others_->core = core_;
    for (pid_t thread : others_->threads)
      if (thread != 0 && syscall(SYS_tgkill, getpid(), thread, 0) == 0) send_off(thread);
  }

  // Called by each of the other threads at the start of the region.
  void leave_core(long me) const {
    if (own_number == 0) own_number = pid_t(syscall(SYS_gettid));
    if (me < Others::MOST) others_->threads[me] = own_number;
    if (sched_getcpu() == core_) send_off(own_number);
  }

 private:
  void send_off(pid_t thread) const {
    cpu_set_t cores;
    if (pthread_getaffinity_np(leader_, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < threads_) return;
    CPU_CLR(core_, &cores);
    if (CPU_COUNT(&cores) > 0) sched_setaffinity(thread, sizeof cores, &cores);
  }

  int threads_, core_;
  pthread_t leader_;
  Others* others_;
};

#else

struct Leader {
  explicit Leader(int) {}
  void leave_core(long) const {}
};

#endif

}  // namespace korch

#pragma GCC visibility pop
