// A process group of NCCL: ranks of one device among ranks of other processes. Each local rank has a thread, a stream
// and a communicator of its own. This class knows no CUDA; GroupGpu does.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/group/group_channel.h"
#include "cuda/group/group_gpu.h"
#include "transport/nccl/nccl_group.h"

namespace refit::cuda {

class GpuGroup : public NcclGroup {
 public:
  // Opens the library; touches no GPU. Throws GroupError (kRefused, kSharedGpu) if the group is impossible.
  GpuGroup(GroupHost host, const NcclGroupOptions& options);
  ~GpuGroup() override;

  std::string describe() const override;
  std::string library() const override;
  void connect(const uint8_t* id, GroupDeadline deadline) override;
  void stage(uint64_t bytes, int slots = kGroupSlots) override;
  // The result does not own the memory: see NcclGroup in core/library/cuda_library.cc.
  StagedSlot staged(int slot) const override;
  void begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) override;
  void arrive(GroupDeadline deadline) override;
  void begin_messages(int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline) override;
  std::vector<uint64_t> places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                               const std::vector<Rect>& rects, int set) const override;
  void receive_in_place(const std::vector<GroupPart>& parts, int set, int root, GroupDeadline deadline) override;
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) override;
  void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) override;
  void params(Device& device, const CoreConfig& config, int rank, int set, int root, GroupDeadline deadline) override;
  void params(int rank, int set, int root, GroupDeadline deadline);
  void barrier(GroupDeadline deadline) override;
  void abort(const std::string& reason) noexcept override;
  void end() noexcept override;

 private:
  struct State;

  // The result of a call on all channels: the first failure and its channel.
  struct Outcome {
    std::exception_ptr error;
    int channel = -1;
    double seconds = 0;
  };

  Outcome run(GroupDeadline deadline, bool cancel, const std::function<void(GroupChannel&)>& fn);
  void on_channels(const char* phase, GroupDeadline deadline, const std::function<void(GroupChannel&)>& fn);
  void open_channels();
  [[noreturn]] void lose(const std::string& message);
  void require_usable(const char* phase) const;
  void require_idle(const char* phase) const;
  void require_free_slots() const;
  void all_or_none(GroupDeadline deadline, const std::function<void(GroupChannel&)>& fn);
  void require_root(int root) const;
  void require_slot(int slot) const;
  // The messages of each channel, with their memory.
  std::vector<std::vector<GroupMessage>> place(int slot, const std::vector<NcclMessage>& messages) const;
  int local_ranks() const;

  const NcclGroupOptions options_;
  const NcclApi& api_;
  // Shared with the GPUs' threads: a stuck thread keeps alive what it uses.
  const std::shared_ptr<State> state_;
};

}  // namespace refit::cuda
