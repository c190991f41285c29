#include "cuda/device/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace refit::cuda {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// The number that the file contains. "max" and missing files count as unknown.
uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : kUnknown;
}

// Cached files count as used memory of a group, but the kernel drops them when needed: above all the checkpoint that
// was just read.
uint64_t files_of(const std::string& group, const std::string& prefix) {
  std::ifstream file(group + "/memory.stat");
  uint64_t bytes = 0, value = 0;
  for (std::string name; file >> name >> value;) {
    if (name == prefix + "inactive_file" || name == prefix + "active_file") bytes += value;
  }
  return bytes;
}

// `prefix`: of the fields that include the groups below, as the limit does.
uint64_t left_of_group(const std::string& group, const char* limit, const char* used, const char* prefix) {
  const uint64_t most = number_in(group + limit), now = number_in(group + used);
  if (most == kUnknown || now == kUnknown) return kUnknown;
  return (most > now ? most - now : 0) + files_of(group, prefix);
}

}  // namespace

uint64_t available_host_bytes(const std::string& root) {
  uint64_t left = kUnknown;
  std::ifstream file(root + "/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    uint64_t kilobytes = 0;
    file >> kilobytes;
    std::getline(file, unit);
    if (name == "MemAvailable:") left = kilobytes * 1024;
  }
  const std::string groups = root + "/sys/fs/cgroup";
  left = std::min(left, left_of_group(groups, "/memory.max", "/memory.current", ""));
  return std::min(left,
                  left_of_group(groups + "/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"));
}

}  // namespace refit::cuda
