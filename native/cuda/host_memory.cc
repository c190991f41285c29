#include "cuda/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace refit::cuda {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// The number in a file of one; "max" and files that do not exist are unknown.
uint64_t number_in(const char* path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : kUnknown;
}

uint64_t left_of_group(const char* limit, const char* used) {
  const uint64_t most = number_in(limit), now = number_in(used);
  if (most == kUnknown || now == kUnknown) return kUnknown;
  return most > now ? most - now : 0;
}

}  // namespace

uint64_t available_host_bytes() {
  uint64_t left = kUnknown;
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    uint64_t kilobytes = 0;
    file >> kilobytes;
    std::getline(file, unit);
    if (name == "MemAvailable:") left = kilobytes * 1024;
  }
  left = std::min(left, left_of_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"));
  return std::min(left, left_of_group("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                      "/sys/fs/cgroup/memory/memory.usage_in_bytes"));
}

}  // namespace refit::cuda
