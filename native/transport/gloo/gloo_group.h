// A process group of torch's gloo backend, in host memory: broadcast and barrier, as ordinary ranks among torch's.
//
// All ranks of this process have one memory between them: of several that are to receive the same bytes one keeps them,
// and what it forwards for the others comes from there.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/group.h"
#include "transport/gloo/gloo_collective.h"
#include "transport/gloo/gloo_mesh.h"

namespace refit {

class GlooGroup : public Group {
 public:
  // Listens on `host`, an address of this machine. `ranks`: this process's, of `size`. Throws std::invalid_argument and
  // GroupError(kRefused).
  GlooGroup(int size, std::vector<int> ranks, const std::string& host);

  // The value of the rank's key in the store; `rank` is one of this process's.
  std::vector<uint8_t> address(int rank) const;
  // Connects with all others: `peers` has the value of every rank's key. Ranks that connect when they have something to
  // do (TORCH_GLOO_LAZY_INIT) are not waited for.
  void connect(const std::vector<std::vector<uint8_t>>& peers, GroupDeadline deadline);

  std::string describe() const override;
  void stage(uint64_t bytes, int slots = kGroupSlots) override;
  StagedSlot staged(int slot) const override;
  void receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) override;
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) override;
  void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) override;
  // On a CPU alone: the parameters must be host memory.
  void params(Device& device, const CoreConfig& config, int rank, int root, GroupDeadline deadline) override;
  void barrier(GroupDeadline deadline) override;
  void abort(const std::string& reason) noexcept override;
  void end() noexcept override;

 private:
  struct Memory;

  bool is_mine(int rank) const;
  // Throws where the group cannot (or no longer) do what is asked.
  void check_usable(const char* phase) const;
  void check_root(int root) const;
  void broadcast(const char* phase, std::vector<gloo::Piece> pieces, int root, GroupDeadline deadline);
  // Calls `collective()` for one, and goes on until it is done.
  template <typename F>
  void run(const char* phase, GroupDeadline deadline, F&& collective);
  [[noreturn]] void break_off(GroupErrorKind kind, const char* phase, const std::string& what);

  const gloo::Members members_;
  gloo::Mesh mesh_;
  bool connected_ = false;
  uint32_t next_tag_ = 0;  // torch counts a group's collectives
  std::chrono::steady_clock::time_point began_;

  mutable std::mutex mutex_;  // of what follows: any thread asks for it
  std::string broken_;        // why the group is of no more use
  std::shared_ptr<Memory> slots_[kGroupSlots];
  std::atomic<bool> aborted_{false};
};

}  // namespace refit
