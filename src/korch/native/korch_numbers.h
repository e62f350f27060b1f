// The numbers of a kernel that differ between the sizes of a range: each call passes a table of them.
#pragma once

#include "korch_vector.h"

namespace korch {

struct Numbers {
  const long* table = nullptr;
};

// A template argument that stands for entry I of the table, in place of a constant number.
template <int I>
struct At {};

KORCH_INLINE constexpr long value(long number, Numbers) { return number; }
template <int I>
KORCH_INLINE long value(At<I>, Numbers numbers) { return numbers.table[I]; }

KORCH_INLINE constexpr bool is_known(long) { return true; }
template <int I>
KORCH_INLINE constexpr bool is_known(At<I>) { return false; }

}  // namespace korch
