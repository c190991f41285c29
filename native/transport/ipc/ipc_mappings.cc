#include "transport/ipc/ipc_mappings.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/fault.h"
#include "transport/ipc/ipc_plan.h"

namespace refit::ipc {
namespace {

// Compares the open files behind two descriptors. Duplicates have the same open file, also if they were taken from
// another process. The descriptors' numbers cannot be compared, because the system reuses them. Returns 0 for the same
// file, above 0 for different ones, below 0 if the system does not report it (old kernel, seccomp).
long compare_files(int a, int b) {
  const auto self = static_cast<long>(getpid());
  return syscall(SYS_kcmp, self, self, static_cast<long>(KCMP_FILE), static_cast<long>(a), static_cast<long>(b));
}

// The key of a kept segment. For descriptors it has only the block size and their number: `find` compares the rest.
std::string table_key(const Segment& segment) {
  if (segment.fds.empty()) return segment_key(segment);
  return "blocks " + std::to_string(segment.block_bytes) + " " + std::to_string(segment.fds.size());
}

void close_files(const std::vector<int>& fds) {
  for (const int fd : fds) ::close(fd);
}

}  // namespace

Mappings::~Mappings() {
  try {
    close_all();
  } catch (const std::exception&) {
  }
}

Mappings::Table::iterator Mappings::find(Table& table, const Segment& segment) {
  const auto [begin, end] = table.equal_range(table_key(segment));
  for (auto it = begin; it != end; ++it) {
    const std::vector<int>& fds = it->second.fds;
    if (std::equal(fds.begin(), fds.end(), segment.fds.begin(), segment.fds.end(),
                   [](int a, int b) { return compare_files(a, b) == 0; })) {
      return it;
    }
  }
  return table.end();
}

const Mapping* Mappings::find(int rank, const Segment& segment, const std::string& keep) {
  Table& table = ranks_[static_cast<size_t>(rank)];
  const auto found = find(table, segment);
  if (found == table.end()) return nullptr;
  if (!keep.empty()) found->second.name = keep;
  return &found->second.mapping;
}

bool Mappings::keep(int rank, const Segment& segment, const std::string& name, const Mapping& mapping) {
  Kept kept{name, mapping, {}};
  for (const int fd : segment.fds) {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own >= 0) kept.fds.push_back(own);
    if (own >= 0 && compare_files(fd, own) == 0) continue;
    close_files(kept.fds);
    return false;
  }
  try {
    ranks_[static_cast<size_t>(rank)].emplace(table_key(segment), std::move(kept));
  } catch (...) {
    close_files(kept.fds);
    throw;
  }
  return true;
}

size_t Mappings::kept() const {
  size_t sum = 0;
  for (const Table& table : ranks_) sum += table.size();
  return sum;
}

template <typename Wanted>
uint64_t Mappings::close_kept(Wanted wanted) {
  std::vector<Open> open;
  for (size_t rank = 0; rank < ranks_.size(); rank++) {
    for (auto it = ranks_[rank].begin(); it != ranks_[rank].end();) {
      if (!wanted(it->second.name)) {
        ++it;
        continue;
      }
      open.push_back({static_cast<int>(rank), it->second.mapping});
      close_files(it->second.fds);
      it = ranks_[rank].erase(it);
    }
  }
  return close(std::move(open));
}

uint64_t Mappings::close(const std::string& name) {
  return close_kept([&](const std::string& its) { return its == name; });
}

uint64_t Mappings::close_all() {
  return close_kept([](const std::string&) { return true; });
}

uint64_t Mappings::close(std::vector<Open> open) {
  {
    const std::lock_guard lock(mutex_);
    open.insert(open.end(), left_open_.begin(), left_open_.end());
    left_open_.clear();
    warning_.clear();
  }
  // One thread for each rank. The driver closes the mappings of one rank one at a time anyway, and several threads that
  // pass its lock to each other are slower than one.
  std::vector<std::vector<Open>> of_rank(ranks_.size());
  for (const Open& one : open) of_rank[static_cast<size_t>(one.rank)].push_back(one);
  std::erase_if(of_rank, [](const std::vector<Open>& its) { return its.empty(); });
  std::atomic<uint64_t> closed = 0;
  pool.parallel_for(static_cast<int64_t>(of_rank.size()), [&](int64_t index, int) {
    for (const Open& one : of_rank[static_cast<size_t>(index)]) {
      if (shut(one)) closed++;
    }
  });
  return closed;
}

bool Mappings::shut(const Open& open) {
  std::string why;
  try {
    if (REFIT_FAULT(kIpcClose)) throw Refused(Cause::kUnknown, "injected fault: close");
    driver.close(open.rank, open.mapping);
    return true;
  } catch (const std::exception& e) {
    why = e.what();
  }
  const std::lock_guard lock(mutex_);
  left_open_.push_back(open);
  warning_ = "CUDA memory of a sender stays open on rank " + std::to_string(open.rank) + ", " + why +
             "; closing it is tried again with the next write";
  return false;
}

std::string Mappings::warning() const {
  const std::lock_guard lock(mutex_);
  return warning_;
}

}  // namespace refit::ipc
