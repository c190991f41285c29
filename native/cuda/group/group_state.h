// The state that a group's calls and its GPUs' threads share.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/group/group.h"

namespace refit::cuda {

struct GpuGroup::State {
  explicit State(GroupHost given) : host(std::move(given)) {}

  const GroupHost host;
  std::vector<std::unique_ptr<GroupChannel>> channels;  // from connect to end
  std::vector<int> tensor_ranks;                        // the tensor-parallel rank of each channel
  bool connected = false, ended = false;
  uint64_t slot_bytes = 0;
  int slots = 0;            // of so many bytes
  std::vector<int> coming;  // slots with a pending receive, in order
  uint64_t room(int slot) const { return slot < slots ? slot_bytes : 0; }
  std::atomic<bool> cancel{false};

  mutable std::mutex mutex;
  std::string reason;    // why it was aborted, or the first failure, after which the group is unusable
  bool aborted = false;  // by the caller
  bool lost = false;     // a GPU is lost: nothing is freed
};

}  // namespace refit::cuda
