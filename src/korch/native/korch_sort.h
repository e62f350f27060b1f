// Rows sorted by the number of a group, in blocks of rows of one group.

#pragma once

#include <algorithm>

#include "korch_tile.h"

namespace korch {

// Writes the row at each place of each block and -1 behind the last, the group of each block (-1 for one without rows)
// and its number of rows. A key less than 0 counts from the end; others are clipped to the groups.
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

}  // namespace korch
