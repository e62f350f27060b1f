// Numbers of a kernel that differ between sizes of a range: a table of them comes with each call.
#pragma once

#include "korch_vector.h"

namespace korch {

struct Numbers {
  const long* table = nullptr;
};

// Stands for entry I of the table where a template takes a number.
template <int I>
struct At {};

KORCH_INLINE constexpr long value(long number, Numbers) { return number; }
template <int I>
KORCH_INLINE long value(At<I>, Numbers numbers) { return numbers.table[I]; }

KORCH_INLINE constexpr bool is_known(long) { return true; }
template <int I>
KORCH_INLINE constexpr bool is_known(At<I>) { return false; }

}  // namespace korch
