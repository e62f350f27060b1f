// Asks the system whether this process may use matrix units (Intel AMX).
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace korch {

#if defined(__linux__) && defined(__x86_64__)
inline bool may_use_matrix_units() {
  constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned BFLOAT16 = 1u << 22, INT8 = 1u << 25;  // EDX of leaf 7: a machine may report tiles without these
  unsigned a = 0, b = 0, c = 0, d = 0;
  static const bool may =
      __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BFLOAT16) && (d & INT8) && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  return may;
}
#else
inline bool may_use_matrix_units() { return false; }
#endif

}  // namespace korch
