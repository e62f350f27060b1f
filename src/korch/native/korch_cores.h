// The number of cores that this process may use: those in its affinity mask, limited by its container's CPU quota.
//
// A quota limits CPU time: with a quota of 2 cores on 8 cores, 8 threads run for a quarter of each period and are then
// stopped. A spinning thread consumes the quota, too.
#pragma once

#include <stdio.h>
#include <string.h>

extern "C" int omp_get_num_procs(void);

#pragma GCC visibility push(hidden)

namespace korch {

constexpr int PATH_BYTES = 4096;

// Read one or two numbers from a file; return how many there are. The text "max" is not a number.
inline int read_numbers(const char* folder, const char* name, long (&found)[2]) {
  char path[PATH_BYTES + 32];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return 0;
  const int count = fscanf(file, "%ld %ld", &found[0], &found[1]);
  fclose(file);
  return count < 0 ? 0 : count;
}

// The quota of a control group (cgroup v2 or v1) in cores, at least 1; `cores` if it has no quota or a larger one.
inline int group_cores(const char* folder, int cores) {
  long quota[2] = {}, period[2] = {};
  if (read_numbers(folder, "cpu.max", quota) == 2) {
    period[0] = quota[1];
  } else if (read_numbers(folder, "cpu.cfs_quota_us", quota) != 1 ||
             read_numbers(folder, "cpu.cfs_period_us", period) != 1) {
    return cores;
  }
  if (quota[0] <= 0 || period[0] <= 0 || quota[0] / period[0] >= cores) return cores;
  return quota[0] < period[0] ? 1 : int(quota[0] / period[0]);
}

// Whether a comma-separated list contains the name "cpu".
inline bool has_cpu(const char* names) {
  for (const char* at = names; (at = strstr(at, "cpu")) != nullptr; at += 3)
    if ((at == names || at[-1] == ',') && (at[3] == ',' || at[3] == 0)) return true;
  return false;
}

// The least quota of this process's control groups and of their ancestors. `korch.system.cores` does the same in Python.
inline int quota_cores(const char* root, int cores) {
  char path[PATH_BYTES + 32], line[PATH_BYTES], top[PATH_BYTES];
  snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return cores;
  while (fgets(line, sizeof line, file) != nullptr) {
    line[strcspn(line, "\n")] = 0;
    char* names = strchr(line, ':');
    char* group = names == nullptr ? nullptr : strchr(++names, ':');
    if (group == nullptr) continue;
    *group++ = 0;
    if (*names != 0 && !has_cpu(names)) continue;
    // cgroup v2 has no controller names. In a container, the path may be the host's: then only the root group is visible.
    const char* const folders[] = {names, "cpu"};
    for (int i = 0; i < (*names != 0 ? 2 : 1); ++i) {
      const int length = snprintf(top, sizeof top, "%s/sys/fs/cgroup/%s", root, folders[i]);
      if (length < 0 || size_t(length) + strlen(group) + 2 > sizeof top) break;
      snprintf(path, sizeof path, "%s/%s", top, group);
      for (;;) {
        cores = group_cores(path, cores);
        if (strlen(path) <= size_t(length)) break;
        *strrchr(path, '/') = 0;
      }
    }
  }
  fclose(file);
  return cores;
}

inline int usable_cores(const char* root = "") { return quota_cores(root, omp_get_num_procs()); }

}  // namespace korch

#pragma GCC visibility pop
