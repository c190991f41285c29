// Mappings that outlive a write: mappings that are kept under a name, and mappings that could not be closed.
//
// Threads: one caller at a time. `shut` is the exception: any thread may call it.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/pool.h"
#include "transport/ipc/ipc_driver.h"

namespace refit::ipc {

class Mappings {
 public:
  // Both must outlive this object. The pool's threads close the mappings.
  Mappings(Driver& driver, Pool& pool) : driver(driver), pool(pool), ranks_(driver.ranks()) {}
  // Closes all mappings.
  ~Mappings();
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  // The mapping of the segment that is kept on the rank, or null. If `keep` is not empty, the mapping is renamed to it.
  const Mapping* find(int rank, const Segment& segment, const std::string& keep);
  // Returns false if the mapping could not be found again later. The caller must then close it.
  bool keep(int rank, const Segment& segment, const std::string& name, const Mapping& mapping);

  // Closes the mappings that are kept under the name, or all. Returns how many were closed.
  uint64_t close(const std::string& name);
  uint64_t close_all();
  size_t kept() const;

  struct Open {
    int rank = 0;
    Mapping mapping;
  };
  // Closes these mappings and all that could not be closed before, the ranks in parallel. Returns how many were closed.
  uint64_t close(std::vector<Open> open);
  // The message of the last close that failed; empty if everything is closed.
  std::string warning() const;

  Driver& driver;
  Pool& pool;

 private:
  struct Kept {
    std::string name;
    Mapping mapping;
    std::vector<int> fds;  // own duplicates, to find out whether later descriptors are the same blocks
  };
  using Table = std::unordered_multimap<std::string, Kept>;

  Table::iterator find(Table& table, const Segment& segment);
  template <typename Wanted>
  uint64_t close_kept(Wanted wanted);
  bool shut(const Open& open);

  std::vector<Table> ranks_;
  mutable std::mutex mutex_;
  std::vector<Open> left_open_;  // closing them failed; tried again with the next ones
  std::string warning_;
};

}  // namespace refit::ipc
