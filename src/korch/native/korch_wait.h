// Waiting and barriers for the threads of a team: for another thread's count, and for each other.
//
// After each parallel region, OpenMP's threads spin for many milliseconds before they sleep. If other processes need the
// cores, too, a thread then spins while the thread that it waits for has no core. So the kernels of a plan share one
// region, and its threads wait by these functions: they spin for about as long as a kernel takes, and then sleep.
#pragma once

#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "korch_cores.h"
#include "korch_team.h"

extern "C" {
// `korch_threads.cpp` defines this if it is preloaded: it records that a thread begins or ends a wait.
__attribute__((weak)) void korch_threads_wait(int begins);
}

#pragma GCC visibility push(hidden)

namespace korch {

// If there is a core for each thread within the container's quota, waiting threads spin for longer than a kernel takes.
// Otherwise they spin only briefly, as they would take the core from a working thread. The limit is a time, not a count of
// pause instructions: one takes 10 cycles on some CPUs and 140 on others.
constexpr int64_t LOOK_NS = 1000000, SHORT_LOOK_NS = 5000;

inline const int cores = usable_cores();

inline int64_t look_ns(int threads) { return cores >= threads ? LOOK_NS : SHORT_LOOK_NS; }

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// A counter of one thread, for which other threads wait. Each counter has its own cache line.
class alignas(64) Count {
 public:
  uint32_t now() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }

  bool is_at(uint32_t wanted) const { return int32_t(now() - wanted) >= 0; }

  // Writes before this call are visible to threads that have waited. Only one thread sets a counter, and only upwards.
  void set(uint32_t value) {
    __atomic_store_n(&value_, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST) != 0) wake_all();
  }

  // No wake-up is lost: a sleeper adds itself to `sleepers_` before it reads `value_`, and
  // `set` writes `value_` before it reads `sleepers_`. All four are sequentially consistent, so
  // either the sleeper sees the new value and does not sleep, or `set` sees the sleeper and wakes
  // it; and the system call returns at once if the value is no longer the one that was read.
  void wait_for(uint32_t wanted, int64_t look_ns) {
    if (korch_threads_wait != nullptr) korch_threads_wait(true);
    if (!look(wanted, look_ns)) {
      __atomic_fetch_add(&sleepers_, 1, __ATOMIC_SEQ_CST);
      for (uint32_t now; int32_t((now = __atomic_load_n(&value_, __ATOMIC_SEQ_CST)) - wanted) < 0;) sleep(now);
      __atomic_fetch_sub(&sleepers_, 1, __ATOMIC_SEQ_CST);
    }
    if (korch_threads_wait != nullptr) korch_threads_wait(false);
  }

 private:
  // Spin for at most this long; return whether the count has reached the value.
  bool look(uint32_t wanted, int64_t look_ns) const {
    for (int64_t until_ns = 0;;) {
      for (int i = 0; i < 32; ++i) {
        if (is_at(wanted)) return true;
        relax();
      }
      const int64_t time_ns = now_ns();
      if (until_ns == 0) until_ns = time_ns + look_ns;
      else if (time_ns > until_ns) return false;
    }
  }

#ifdef __linux__
  void sleep(uint32_t now) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, now, nullptr); }
  void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake_all() {}
#endif
  // Accessed through the compiler's atomic builtins: a plan that includes <atomic> takes twice as long to compile.
  uint32_t value_ = 0;
  uint32_t sleepers_ = 0;
};

// The state that the threads of a team share. A thread's counter is the number of barriers that it has reached. At a
// barrier, the first thread sets its counter last, after all others have arrived.
struct Team {
  Count* counts;
  long threads;
  int64_t look_ns;
  void (*waited)(Team&, int64_t since_ns) = nullptr;  // called by the team's first thread after a wait
  void (*all_came)(Team&) = nullptr;                  // called by the first thread at a barrier, while all others wait
  bool (*ends)(Team&) = nullptr;                      // whether no more tasks are to run
};

inline void meet_team(Member& own) {
  Team& team = *own.team;
  Count* const counts = team.counts;
  const uint32_t turn = ++own.turn;
  if (own.me != 0) {
    counts[own.me].set(turn);
    counts[0].wait_for(turn, team.look_ns);
    return;
  }
  const bool is_told = team.waited != nullptr;
  for (long i = 1; i < own.threads; ++i) {
    if (counts[i].is_at(turn)) continue;
    const int64_t since_ns = is_told ? now_ns() : 0;
    counts[i].wait_for(turn, team.look_ns);
    if (is_told) team.waited(team, since_ns);
  }
  if (is_told) team.all_came(team);
  counts[0].set(turn);
}

// Set all threads' counters to that of the first thread, because some may have missed barriers. Returns that count.
inline uint32_t begin_turns(Team& team) {
  const uint32_t turn = team.counts[0].now();
  for (long i = 1; i < team.threads; ++i)
    if (team.counts[i].now() != turn) team.counts[i].set(turn);
  return turn;
}

inline Member member(Team& team, long me, long threads, uint32_t turn) {
  return {me, threads, meet_team, &team, turn};
}

}  // namespace korch

#pragma GCC visibility pop
