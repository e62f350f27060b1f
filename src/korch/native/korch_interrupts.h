// Detects whether the user has interrupted a run.
#pragma once

#include <signal.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#pragma GCC visibility push(hidden)

namespace korch {

// While an object exists in the process's main thread, SIGINT sets a flag and then calls the handler that was installed
// before. (Python's handler alone would not end a run: it, too, only sets a flag until the run has ended.) This costs
// some system calls, so short runs do not use it.
class Interrupts {
 public:
  static bool came() { return __atomic_load_n(&came_, __ATOMIC_RELAXED); }

#ifdef __linux__
  explicit Interrupts(bool is_wanted) {
    if (!is_wanted || syscall(SYS_gettid) != getpid() || sigaction(SIGINT, nullptr, &before_) != 0) return;
    if (before_.sa_handler == SIG_DFL || before_.sa_handler == SIG_IGN) return;
    came_ = false;
    struct sigaction own = before_;
    own.sa_flags |= SA_SIGINFO;
    own.sa_sigaction = note;
    is_on_ = sigaction(SIGINT, &own, nullptr) == 0;
  }
  ~Interrupts() {
    if (!is_on_) return;
    sigaction(SIGINT, &before_, nullptr);
    came_ = false;
  }

 private:
  static void note(int number, siginfo_t *info, void *context) {
    __atomic_store_n(&came_, true, __ATOMIC_RELAXED);
    if (before_.sa_flags & SA_SIGINFO) before_.sa_sigaction(number, info, context);
    else before_.sa_handler(number);
  }

  static inline struct sigaction before_;
  bool is_on_ = false;
#else
  explicit Interrupts(bool) {}

 private:
#endif
  static inline bool came_ = false;
};

}  // namespace korch

#pragma GCC visibility pop
