// Finds out whether the user has interrupted a run.
#pragma once

#include <signal.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#pragma GCC visibility push(hidden)

namespace korch {

// While it lives in the process's main thread, SIGINT is noted beside the handler that there is: Python's handler only
// notes it, too, until the run has ended. It costs some system calls, so short runs do without.
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
