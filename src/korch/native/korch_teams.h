// Kernels side by side in one parallel region: each lane has a team of threads, to which its kernels
// are all there is.
//
// GCC turns a region into a call of GOMP_parallel, and what stands in it into calls of GOMP_barrier,
// omp_get_thread_num and omp_get_num_threads. A library that holds this text has its own of these
// four, seen by no other. To a thread that has a seat in a team they tell of the team; to any other
// they do what OpenMP's do. So all teams together are one region of as many threads as each other
// kernel has: no thread is made or ended for them, and none stays behind.
//
// The first thread of a team leads: it runs kernels, and the others wait until it opens a region.
#pragma once

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include <atomic>

#include "korch_shares.h"

#define KORCH_OWN extern "C" __attribute__((weak, noinline))

extern "C" int omp_get_num_procs(void);

// `korch_threads.cpp` has it where it is preloaded: a thread begins to wait, or ends.
extern "C" __attribute__((weak)) void korch_threads_wait(int begins);

#pragma GCC visibility push(hidden)

namespace korch_teams {

// What the functions that have their names below would be without them.
inline void (*const real_parallel)(void (*)(void*), void*, unsigned, unsigned) =
    reinterpret_cast<decltype(real_parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
inline void (*const real_barrier)() =
    reinterpret_cast<decltype(real_barrier)>(dlsym(RTLD_DEFAULT, "GOMP_barrier"));
inline int (*const real_thread_num)() =
    reinterpret_cast<decltype(real_thread_num)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
inline int (*const real_num_threads)() =
    reinterpret_cast<decltype(real_num_threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
inline const int cores = omp_get_num_procs();

// As long as each thread has a core, those that wait look again and again, longer than a kernel
// takes; else they would keep others from their work.
constexpr int LOOKS = 20000, FEW_LOOKS = 100;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

inline void watched(bool begins) {
  if (korch_threads_wait != nullptr) korch_threads_wait(begins);
}

// A count that threads wait for. Each has a line of the caches of its own.
class alignas(64) Count {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  // All that was written before is seen by those who waited.
  void advance() {
    value_.fetch_add(1);
    if (sleepers_.load() != 0) wake_all();
  }

  void wait_for(uint32_t wanted, int looks) {
    watched(true);
    for (int i = 0; i < looks && !is_at(wanted); ++i) relax();
    if (!is_at(wanted)) {
      sleepers_.fetch_add(1);
      for (uint32_t now; int32_t((now = value_.load()) - wanted) < 0;) sleep(now);
      sleepers_.fetch_sub(1);
    }
    watched(false);
  }

 private:
  bool is_at(uint32_t wanted) const { return int32_t(now() - wanted) >= 0; }
#ifdef __linux__
  void sleep(uint32_t now) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, now, nullptr); }
  void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake_all() {}
#endif
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Threads that work on the regions of a lane's kernels, one region after the other.
struct Team {
  int threads = 1;
  int looks = FEW_LOOKS;
  void (*work)(void*) = nullptr;  // null: there will be no other
  void* data = nullptr;
  int wanted = 0;        // threads that work on it
  uint32_t met_before = 0;
  Count opened;  // with each region, and when there will be no other
  Count done;    // with each region, by each thread but the leader
  Count met;     // with each barrier, by each thread that works on the region
};

// A thread's place in a team, if it has one, and in the region that it works on: else it is alone.
struct Seat {
  Team* team = nullptr;
  int me = 0;
  int threads = 1;
  bool is_inside = false;
  uint32_t met = 0;  // of the team, when all have come to the last barrier
};

inline constinit thread_local Seat seat;

// Work on the regions that the leader opens, until there will be no other.
inline void follow(Team& team, int me) {
  for (uint32_t turn = 1;; ++turn) {
    team.opened.wait_for(turn, team.looks);
    if (team.work == nullptr) return;
    if (me < team.wanted) {
      seat = {&team, me, team.wanted, true, team.met_before};
      team.work(team.data);
      seat = {};
    }
    team.done.advance();
  }
}

// Run kernels whose regions the team works on.
template <class F>
inline void lead(Team& team, F run) {
  seat = {&team, 0, 1, false};
  run();
  seat = {};
  team.work = nullptr;
  team.opened.advance();
}

// Open a region. One inside of another has one thread.
inline void open(void (*work)(void*), void* data, unsigned wanted) {
  const Seat before = seat;
  Team& team = *before.team;
  const int most = before.is_inside ? 1 : team.threads;
  const int threads = wanted == 0 || wanted > unsigned(most) ? most : int(wanted);
  seat = {&team, 0, threads, true, team.met.now()};
  if (threads == 1) {
    work(data);
  } else {
    team.work = work, team.data = data, team.wanted = threads, team.met_before = seat.met;
    team.opened.advance();
    work(data);
    team.done.wait_for(team.opened.now() * (team.threads - 1), team.looks);
  }
  seat = before;
}

// Wait until all that work on a region have come.
inline void meet() {
  if (seat.threads == 1) return;
  seat.met += seat.threads;
  seat.team->met.advance();
  seat.team->met.wait_for(seat.met, seat.team->looks);
}

}  // namespace korch_teams

// A compiler knows these names, and that two calls in one function give the same: none is inlined.
KORCH_OWN void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags) {
  if (korch_teams::seat.team != nullptr) return korch_teams::open(work, data, threads);
  korch_teams::real_parallel(work, data, threads, flags);
}

KORCH_OWN void GOMP_barrier(void) {
  if (korch_teams::seat.team != nullptr) return korch_teams::meet();
  korch_teams::real_barrier();
}

KORCH_OWN int omp_get_thread_num(void) {
  const korch_teams::Seat& own = korch_teams::seat;
  return own.team == nullptr ? korch_teams::real_thread_num() : own.me;
}

KORCH_OWN int omp_get_num_threads(void) {
  const korch_teams::Seat& own = korch_teams::seat;
  return own.team == nullptr ? korch_teams::real_num_threads() : own.threads;
}

namespace korch_shares {

// Run all lanes at once: lane l has the parts before ends[l] and after the lane before it, and a team
// of threads[l]. The region has as many threads as those of other kernels: GCC's OpenMP ends the
// threads that a region has less, and makes them anew for the next. Where it has fewer than it asks
// for, as inside of another region, a lane has one.
template <int THREADS, int PARTS, int SLOTS, int LANES>
int run(const Part (&parts)[PARTS], const Slot (&slots)[SLOTS], const int (&ends)[LANES],
        const int (&threads)[LANES], void* state, void* const* buffers) {
  void* const* states = static_cast<void* const*>(state);
  korch_teams::Team teams[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    teams[lane].threads = threads[lane];
    if (korch_teams::cores >= THREADS) teams[lane].looks = korch_teams::LOOKS;
  }
  int failed = 0;
#pragma omp parallel num_threads(THREADS) reduction(| : failed)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    const auto lead = [&](int lane) {
      korch_teams::lead(teams[lane], [&] {
        failed |= run_lane(parts, slots, SLOTS, lane == 0 ? 0 : ends[lane - 1], ends[lane], PARTS,
                           states, buffers);
      });
    };
    if (all < THREADS) {
      for (int lane = me; lane < LANES; lane += all) {
        teams[lane].threads = 1;
        lead(lane);
      }
    } else {
      for (int lane = 0, first = 0; lane < LANES; first += threads[lane++]) {
        if (me < first || me >= first + threads[lane]) continue;
        if (me == first) lead(lane);
        else korch_teams::follow(teams[lane], me - first);
      }
    }
  }
  return failed;
}

}  // namespace korch_shares

#pragma GCC visibility pop
