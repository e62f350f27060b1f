// Sorts rows by group into blocks that each contain rows of one group only; finds the first elements of a sorted row.

#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "korch_tile.h"

namespace korch {

// Writes, for each block, its rows (unused entries are -1), its group (-1 for a block without rows) and its number of rows.
// A negative key counts from the end; keys out of range are clipped to the valid groups.
template <long ROWS, long GROUPS, long BLOCK, long BLOCKS, typename T>
void sort_rows(const T* keys, int32_t* order, int32_t* group, int32_t* count) {
  static_assert(ROWS > 0 && GROUPS > 0 && BLOCK > 0);
  const auto group_of = [keys](long row) {
    const int64_t key = keys[row];
    return std::clamp<int64_t>(key < 0 ? key + GROUPS : key, 0, GROUPS - 1);
  };
  int32_t place[GROUPS] = {};
  for (long row = 0; row < ROWS; ++row) ++place[group_of(row)];
  long block = 0;
  for (long g = 0; g < GROUPS; ++g) {
    const long first = block;
    for (long left = place[g]; left > 0; left -= BLOCK, ++block) {
      group[block] = static_cast<int32_t>(g);
      count[block] = static_cast<int32_t>(std::min(left, BLOCK));
    }
    place[g] = static_cast<int32_t>(first * BLOCK);
  }
  std::fill(group + block, group + BLOCKS, -1);
  std::fill(count + block, count + BLOCKS, 0);
  std::fill(order, order + BLOCKS * BLOCK, -1);
  for (long row = 0; row < ROWS; ++row) order[place[group_of(row)]++] = static_cast<int32_t>(row);
}

// Whether element a is sorted before element b; false for equal elements. NaN is greater than all numbers.
template <bool LARGEST, typename T>
KORCH_INLINE bool comes_before(T a, T b) {
  return LARGEST ? a > b || (a != a && b == b) : a < b || (b != b && a == a);
}

// Writes the first COUNT elements of the sorted row to `values` and their positions to `places`; either may be nullptr.
template <long SIZE, long COUNT, bool LARGEST, typename T, typename Values, typename Places>
void top(const T* row, [[maybe_unused]] Values values, [[maybe_unused]] Places places) {
  constexpr bool HAS_VALUES = !std::is_null_pointer_v<Values>, HAS_PLACES = !std::is_null_pointer_v<Places>;
  static_assert(COUNT > 0 && COUNT <= SIZE);
  if constexpr (COUNT <= 16) {  // insertion into the sorted list of the best elements so far
    T best[COUNT];
    int64_t place[COUNT];
    for (long i = 0; i < SIZE; ++i) {
      if (i >= COUNT && !comes_before<LARGEST>(row[i], best[COUNT - 1])) continue;
      long at = std::min(i, COUNT - 1);
      for (; at > 0 && comes_before<LARGEST>(row[i], best[at - 1]); --at) {
        best[at] = best[at - 1];
        place[at] = place[at - 1];
      }
      best[at] = row[i];
      place[at] = i;
    }
    if constexpr (HAS_VALUES) std::copy_n(best, COUNT, values);
    if constexpr (HAS_PLACES) std::copy_n(place, COUNT, places);
  } else {
    static thread_local int32_t order[SIZE];
    std::iota(order, order + SIZE, 0);
    std::partial_sort(order, order + COUNT, order + SIZE, [row](int32_t a, int32_t b) {
      const bool is_first = comes_before<LARGEST>(row[a], row[b]);
      return is_first || (a < b && !comes_before<LARGEST>(row[b], row[a]));
    });
    for (long i = 0; i < COUNT; ++i) {
      if constexpr (HAS_VALUES) values[i] = row[order[i]];
      if constexpr (HAS_PLACES) places[i] = order[i];
    }
  }
}

}  // namespace korch
