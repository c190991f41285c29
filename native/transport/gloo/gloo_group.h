// A process group of torch's gloo backend, in host memory: broadcast and barrier, as ordinary ranks among torch's.
//
// All ranks of this process share one memory. If several of them receive the same bytes, one keeps them and forwards
// them for the others.
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
  // Listens on `host`, an address of this machine. `ranks`: this process's, of `size`. Throws std::invalid_argument,
  // GroupError (kRefused).
  GlooGroup(int size, std::vector<int> ranks, const std::string& host);

  // The value of the rank's key in the store; `rank` is in this process.
  std::vector<uint8_t> address(int rank) const;
  // Connects with all other ranks: `peers` has the value of every rank's key. Does not wait for ranks that connect only
  // when they have something to do (TORCH_GLOO_LAZY_INIT).
  void connect(const std::vector<std::vector<uint8_t>>& peers, GroupDeadline deadline);

  std::string describe() const override;
  void stage(uint64_t bytes, int slots = kGroupSlots) override;
  StagedSlot staged(int slot) const override;
  void receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) override;
  // Receives messages of torch's point-to-point calls into the slot, in any order. `into` of a message is not used.
  void receive_messages(int slot, std::vector<gloo::Message> messages, const std::vector<GroupPart>& parts,
                        GroupDeadline deadline);
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) override;
  void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) override;
  // Only for a CPU: the parameters must be in host memory.
  void params(Device& device, const CoreConfig& config, int rank, int set, int root, GroupDeadline deadline) override;
  void barrier(GroupDeadline deadline) override;
  void abort(const std::string& reason) noexcept override;
  void end() noexcept override;

 private:
  struct Memory;

  bool is_mine(int rank) const;
  // Throws if the group cannot do this, or cannot do it any more.
  void check_usable(const char* phase) const;
  void check_root(int root) const;
  void broadcast(const char* phase, std::vector<gloo::Piece> pieces, int root, GroupDeadline deadline);
  // Creates the work by `collective()` and runs it until it is done.
  template <typename F>
  void run(const char* phase, GroupDeadline deadline, F&& collective);
  [[noreturn]] void break_off(GroupErrorKind kind, const char* phase, const std::string& what);

  const gloo::Members members_;
  gloo::Mesh mesh_;
  bool connected_ = false;
  uint32_t next_tag_ = 0;  // torch counts a group's collectives
  std::chrono::steady_clock::time_point began_;

  mutable std::mutex mutex_;  // guards what follows; any thread may read it
  std::string broken_;        // why the group is unusable
  std::shared_ptr<Memory> slots_[kGroupSlots];
  std::atomic<bool> aborted_{false};
};

}  // namespace refit
