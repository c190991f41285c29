// Mappings that outlive a write: those that are kept under a name, and those whose closing failed.
//
// Threads: one caller at a time, but for `shut`, which any thread may call.
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
  // Both outlive it. The pool's threads close.
  Mappings(Driver& driver, Pool& pool) : driver(driver), pool(pool), ranks_(driver.ranks()) {}
  // Closes all.
  ~Mappings();
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  // What is kept of the segment on the rank; else null. With `keep` it goes under that name from now on.
  const Mapping* find(int rank, const Segment& segment, const std::string& keep);
  // False where it could not be found again: it must be closed then.
  bool keep(int rank, const Segment& segment, const std::string& name, const Mapping& mapping);

  // Closes what is kept under the name, or all; returns how many were closed.
  uint64_t close(const std::string& name);
  uint64_t close_all();
  size_t kept() const;

  struct Open {
    int rank = 0;
    Mapping mapping;
  };
  // Closes these, the ranks at the same time, and what could not be closed before; returns how many were closed.
  uint64_t close(std::vector<Open> open);
  // Of the last close that failed; empty where all is closed.
  std::string warning() const;

  Driver& driver;
  Pool& pool;

 private:
  struct Kept {
    std::string name;
    Mapping mapping;
    std::vector<int> fds;  // own duplicates: they tell whether descriptors that come later mean the same blocks
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
