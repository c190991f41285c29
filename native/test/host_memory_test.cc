// Available host memory, read from the files of an invented system.
#include "cuda/device/host_memory.cc"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "test/check.h"

namespace {

using refit::cuda::available_host_bytes;

class System {
 public:
  System() {
    char path[] = "/tmp/refit-host-memory-XXXXXX";
    root = mkdtemp(path);
    put("proc/meminfo",
        "MemTotal:       256000000 kB\nMemFree: 1000 kB\nMemAvailable:   100000 kB\nHugePages_Total: 0\n");
  }
  ~System() { std::filesystem::remove_all(root); }
  void put(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = std::filesystem::path(root) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  uint64_t left() const { return available_host_bytes(root); }

  std::string root;
};

constexpr uint64_t kMachine = 100000 * 1024;

void without_a_limit_the_memory_of_the_machine_counts() {
  const System system;
  CHECK(system.left() == kMachine);
  system.put("sys/fs/cgroup/memory.max", "max\n");
  system.put("sys/fs/cgroup/memory.current", "5000\n");
  CHECK(system.left() == kMachine);
}

void a_cgroup_has_its_limit_and_its_file_cache_counts_as_free() {
  const System system;
  system.put("sys/fs/cgroup/memory.max", "50000\n");
  system.put("sys/fs/cgroup/memory.current", "49000\n");
  CHECK(system.left() == 1000);
  system.put("sys/fs/cgroup/memory.stat", "anon 9000\nfile 40000\ninactive_file 30000\nactive_file 7000\nslab 1\n");
  CHECK(system.left() == 38000);
  system.put("sys/fs/cgroup/memory.current", "60000\n");
  CHECK(system.left() == 37000);
  system.put("proc/meminfo", "MemAvailable: 2 kB\n");
  CHECK(system.left() == 2048);
}

void a_cgroup_of_version_1_has_its_limit() {
  const System system;
  system.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  system.put("sys/fs/cgroup/memory/memory.usage_in_bytes", "7000\n");
  CHECK(system.left() == kMachine);
  system.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  CHECK(system.left() == 1000);
  system.put("sys/fs/cgroup/memory/memory.stat",
             "cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 40\n");
  CHECK(system.left() == 1340);
}

}  // namespace

int main() {
  without_a_limit_the_memory_of_the_machine_counts();
  a_cgroup_has_its_limit_and_its_file_cache_counts_as_free();
  a_cgroup_of_version_1_has_its_limit();
  return refit::test::finish("host_memory_test");
}
