// Detects whether other processes use the cores of a plan's threads.
#pragma once

#include <stdint.h>

#include "korch_wait.h"

#pragma GCC visibility push(hidden)

namespace korch {

// Detects whether other processes use the cores so much that one thread is faster than all: some thread then has no
// core most of the time, and the others wait for it. Used only by the thread that calls a plan (the leader).
class Oversubscription {
 public:
  // Called when a run begins.
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

  // Called when the leader of `threads` threads has waited for the others since `since_ns`.
  void note_wait(int64_t since_ns, int64_t now_ns, int threads) {
    add_wait(now_ns - since_ns, now_ns, threads);
  }

  // Called when a step has run since `since_ns` on `threads` threads whose waits are unknown. The time in excess of the
  // step's usual time counts as waiting for a core. The caller stores `usual_ns`: 0 at first, then the least time so
  // far, which grows a little with each longer time, so that it follows a lasting change.
  void note_step(int64_t since_ns, int64_t now_ns, int64_t& usual_ns, int threads) {
    const int64_t took_ns = now_ns - since_ns, late_ns = took_ns - usual_ns;
    if (usual_ns == 0 || late_ns < 0) {
      usual_ns = took_ns;
    } else {
      add_wait(late_ns, now_ns, threads);
      usual_ns += late_ns < usual_ns / 64 ? late_ns : usual_ns / 64;
    }
  }

  // Called when the run ends.
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
  bool is_here_ = false, was_here_ = false;  // was_here_: at any time of the run
  int64_t begun_ns_ = 0, waited_ns_ = 0, alone_until_ns_ = 0;
  int64_t work_ns_ = 0;   // the leader's time without waits in a run on all threads; 0 if unknown
  int64_t alone_ns_ = 0;  // how long to run alone: grows with each oversubscription, shrinks with each run without one
};

}  // namespace korch

#pragma GCC visibility pop
