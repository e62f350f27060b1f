// Kernels in one parallel region: one after the other, each on all threads; or side by side in lanes, each
// of which has a team of threads that runs the lane's kernels only.
//
// GCC turns a region into a call of GOMP_parallel, and what stands in it into calls of GOMP_barrier,
// omp_get_thread_num and omp_get_num_threads. A library that holds this text has its own of these
// four, with hidden visibility. For a thread that has a seat in a team they describe the team; for any
// other they call OpenMP's. So all teams together are one region with as many threads as any other kernel
// has: no thread is created or ended for them.
//
// The first thread of a team leads: it runs kernels, and the others wait until it opens a region. Even
// kernels that have all threads run in one region, because of how threads wait: after each region,
// OpenMP's threads spin for many milliseconds before they sleep. Where other processes need the cores, too,
// a thread then spins while the thread that it waits for has no core.
#pragma once

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "korch_concurrent.h"

#define KORCH_OWN extern "C" __attribute__((weak, noinline))

extern "C" {
int omp_get_num_procs(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

// `korch_threads.cpp` has these where it is preloaded: a thread begins to wait, or ends; a region is
// opened, and has the number returned; a thread begins to work on it, or ends; those regions of
// OpenMP's that the thread opens are of no kernel, or are again.
__attribute__((weak)) void korch_threads_wait(int begins);
__attribute__((weak)) int64_t korch_threads_open(void);
__attribute__((weak)) void korch_threads_work(int64_t region, int begins);
__attribute__((weak)) void korch_threads_hide(int begins);
}

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

// If each thread has a core, waiting threads spin for longer than a kernel takes; otherwise they spin
// briefly, as they would take the core from a thread that works. The limit is a time: one pause takes 10
// cycles on some CPUs and 140 on others.
constexpr int64_t LOOK_NS = 1000000, SHORT_LOOK_NS = 5000;

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

inline void watched(bool begins) {
  if (korch_threads_wait != nullptr) korch_threads_wait(begins);
}

// A count that threads wait for. Each has a line of the caches of its own.
class alignas(64) Count {
 public:
  uint32_t now() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }

  // Writes before this call are visible to threads that waited. They wait for `wanted` or more.
  void advance(uint32_t wanted) {
    const uint32_t now = __atomic_add_fetch(&value_, 1, __ATOMIC_SEQ_CST);
    if (now == wanted && __atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST) != 0) wake_all();
  }
  void advance() { advance(now() + 1); }

  // No wake-up is lost: a sleeper adds itself to `sleepers_` before it reads `value_`, and
  // `advance` adds to `value_` before it reads `sleepers_`. All four are sequentially consistent, so
  // either the sleeper sees the new value and does not sleep, or `advance` sees the sleeper and wakes
  // it; and the system call returns at once if the value is no longer the one that was read.
  void wait_for(uint32_t wanted, int64_t look_ns) {
    watched(true);
    if (!look(wanted, look_ns)) {
      __atomic_fetch_add(&sleepers_, 1, __ATOMIC_SEQ_CST);
      for (uint32_t now; int32_t((now = __atomic_load_n(&value_, __ATOMIC_SEQ_CST)) - wanted) < 0;) sleep(now);
      __atomic_fetch_sub(&sleepers_, 1, __ATOMIC_SEQ_CST);
    }
    watched(false);
  }

 private:
  // Spin for this long; return whether the count has reached the value.
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

  bool is_at(uint32_t wanted) const { return int32_t(now() - wanted) >= 0; }
#ifdef __linux__
  void sleep(uint32_t now) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, now, nullptr); }
  void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake_all() {}
#endif
  // Read and changed by atomic functions of the compiler: a plan that includes <atomic> takes twice as long to compile.
  uint32_t value_ = 0;
  uint32_t sleepers_ = 0;
};

// Whether other processes use the cores so much that one thread is faster than all: some thread then has no
// core most of the time, and the others wait for it. Used by a plan's calling thread only.
class Oversubscription {
 public:
  // A run begins.
  void begin(int64_t now_ns) {
    begun_ns_ = now_ns;
    waited_ns_ = 0;
    is_here_ = was_here_ = now_ns < alone_until_ns_;
  }

  // Whether only the leader should run kernels.
  bool is_here(int64_t (*clock_ns)() = now_ns) {
    if (is_here_) is_here_ = clock_ns() < alone_until_ns_;
    return is_here_;
  }

  // The leader of `threads` threads has waited for the others since `since_ns`.
  void note_wait(int64_t since_ns, int64_t now_ns, int threads) {
    add_wait(now_ns - since_ns, now_ns, threads);
  }

  // A step ran since `since_ns` on `threads` threads whose waits are unknown. The time beyond its usual time
  // counts as waiting for a core. The caller keeps `usual_ns`: 0 at first, then the least time, which grows a
  // little with each longer one, so that it follows a lasting change.
  void note_step(int64_t since_ns, int64_t now_ns, int64_t& usual_ns, int threads) {
    const int64_t took_ns = now_ns - since_ns, late_ns = took_ns - usual_ns;
    if (usual_ns == 0 || late_ns < 0) {
      usual_ns = took_ns;
    } else {
      add_wait(late_ns, now_ns, threads);
      usual_ns += late_ns < usual_ns / 64 ? late_ns : usual_ns / 64;
    }
  }

  // The run ends.
  void end(int64_t now_ns) {
    if (was_here_) return;
    const int64_t work_ns = now_ns - begun_ns_ - waited_ns_;
    work_ns_ = work_ns_ == 0 || work_ns < work_ns_ ? work_ns : work_ns_ + (work_ns - work_ns_) / 8;
    alone_ns_ /= 2;
  }

 private:
  void add_wait(int64_t wait_ns, int64_t now_ns, int threads) {
    waited_ns_ += wait_ns;
    // In the first run the amount of work is unknown.
    if (is_here_ || work_ns_ == 0 || waited_ns_ < LEAST_NS) return;
    const int64_t so_far_ns = now_ns - begun_ns_ - waited_ns_;
    const int64_t work_ns = so_far_ns > work_ns_ ? so_far_ns : work_ns_;
    // On one thread, the time without waits is `threads` times as long.
    if (waited_ns_ <= work_ns * (threads - 1)) return;
    is_here_ = was_here_ = true;
    alone_ns_ = 2 * (alone_ns_ > waited_ns_ ? alone_ns_ : waited_ns_);
    if (alone_ns_ > MOST_NS) alone_ns_ = MOST_NS;
    alone_until_ns_ = now_ns + alone_ns_;
  }

  static constexpr int64_t LEAST_NS = 1000000, MOST_NS = 300 * LEAST_NS;
  bool is_here_ = false, was_here_ = false;  // the latter: at any time of the run
  int64_t begun_ns_ = 0, waited_ns_ = 0, alone_until_ns_ = 0;
  int64_t work_ns_ = 0;   // what the leader does in a run of all threads; 0 if not known
  int64_t alone_ns_ = 0;  // more with each oversubscription, less with each run without one
};

// Threads that work on the regions of a lane's kernels, one region after the other. What is no Count is
// written by the leader only: before it advances `opened`, which a follower reads (with acquire) before
// all else, and not again before each follower has advanced `done`, its last access.
struct Team {
  int threads = 1;
  int64_t look_ns = SHORT_LOOK_NS;
  void (*work)(void*) = nullptr;  // null: there will be no other
  void* data = nullptr;
  int wanted = 0;        // threads that work on it
  int64_t region = 0;    // its number, where somebody watches
  Oversubscription* oversubscription = nullptr;
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

// Take a seat, and work on a region.
inline void take(const Seat& own, void (*work)(void*), void* data, int64_t region) {
  const Seat before = seat;
  seat = own;
  if (korch_threads_work != nullptr) korch_threads_work(region, true);
  work(data);
  if (korch_threads_work != nullptr) korch_threads_work(region, false);
  seat = before;
}

// Work on the regions that the leader opens, until there will be no other.
inline void follow(Team& team, int me) {
  for (uint32_t turn = 1;; ++turn) {
    team.opened.wait_for(turn, team.look_ns);
    if (team.work == nullptr) return;
    if (me < team.wanted) {
      take({&team, me, team.wanted, true, team.met_before}, team.work, team.data, team.region);
    }
    team.done.advance(turn * (team.threads - 1));
  }
}

// Run kernels whose regions the team works on.
template <class F>
inline void lead(Team& team, F run) {
  const Seat before = seat;
  seat = {&team, 0, 1, false};
  run();
  seat = before;
  team.work = nullptr;
  team.opened.advance();
}

// Let the leader wait.
inline void lead_wait(Team& team, Count& count, uint32_t wanted) {
  const int64_t since_ns = team.oversubscription != nullptr ? now_ns() : 0;
  count.wait_for(wanted, team.look_ns);
  if (team.oversubscription != nullptr) team.oversubscription->note_wait(since_ns, now_ns(), team.threads);
}

// Open a region. One inside of another has one thread.
inline void open(void (*work)(void*), void* data, unsigned wanted) {
  Team& team = *seat.team;
  const bool is_alone = seat.is_inside || (team.oversubscription != nullptr && team.oversubscription->is_here());
  const int most = is_alone ? 1 : team.threads;
  const int threads = wanted == 0 || wanted > unsigned(most) ? most : int(wanted);
  const Seat own = {&team, 0, threads, true, team.met.now()};
  const int64_t region = korch_threads_open != nullptr ? korch_threads_open() : 0;
  if (threads == 1) return take(own, work, data, region);
  team.work = work, team.data = data, team.wanted = threads, team.met_before = own.met;
  team.region = region;
  team.opened.advance();
  take(own, work, data, region);
  lead_wait(team, team.done, team.opened.now() * (team.threads - 1));
}

// Run kernels one after the other in one OpenMP region, whose threads work on the regions of all of them; on
// one thread in an oversubscription. A null `oversubscription` means that none is detected.
template <class F>
inline void run_together(int threads, Oversubscription* oversubscription, F run) {
  Team team;
  if (oversubscription != nullptr && oversubscription->is_here()) return lead(team, run);
  team.oversubscription = oversubscription;
  if (cores >= threads) team.look_ns = LOOK_NS;
  if (korch_threads_hide != nullptr) korch_threads_hide(true);
  int64_t ended_ns = 0;
#pragma omp parallel num_threads(threads)
  {
    const int me = omp_get_thread_num();
    if (me == 0) {
      team.threads = omp_get_num_threads();
      lead(team, run);
      if (oversubscription != nullptr) ended_ns = now_ns();
    } else {
      follow(team, me);
    }
  }
  if (oversubscription != nullptr) oversubscription->note_wait(ended_ns, now_ns(), team.threads);
  if (korch_threads_hide != nullptr) korch_threads_hide(false);
}

// Run a step that may have threads of its own, or a single region. In an oversubscription it has one thread:
// OpenMP reports one to a library, and a region that the step opens has one.
template <class F>
inline void run_apart(int threads, Oversubscription& oversubscription, int64_t& usual_ns, F run) {
  if (oversubscription.is_here()) {
    const korch_concurrent::OneThread one;
    Team team;
    return lead(team, run);
  }
  const int64_t since_ns = now_ns();
  run();
  oversubscription.note_step(since_ns, now_ns(), usual_ns, threads);
}

// Wait until all that work on a region have come.
inline void meet() {
  if (seat.threads == 1) return;
  Team& team = *seat.team;
  seat.met += seat.threads;
  team.met.advance(seat.met);
  if (seat.me == 0) lead_wait(team, team.met, seat.met);
  else team.met.wait_for(seat.met, team.look_ns);
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

namespace korch_concurrent {

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
    if (korch_teams::cores >= THREADS) teams[lane].look_ns = korch_teams::LOOK_NS;
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

}  // namespace korch_concurrent

#pragma GCC visibility pop
