#include "transport/nccl/nccl_library.h"

#include <condition_variable>
#include <mutex>
#include <utility>

namespace refit {
namespace {

// Counts the writes that read each slot. It is shared with them: the library owns the memory, so calls that would free
// or overwrite it wait for them here.
class Readers {
 public:
  void begin(int slot) {
    const std::lock_guard lock(mutex_);
    count_[slot]++;
  }
  void end(int slot) {
    const std::lock_guard lock(mutex_);
    if (--count_[slot] == 0) idle_.notify_all();
  }
  bool wait(int slot, GroupDeadline deadline) {
    std::unique_lock lock(mutex_);
    return idle_.wait_until(lock, deadline, [&] { return count_[slot] == 0; });
  }
  void wait_all() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return count_[0] == 0 && count_[1] == 0; });
  }

 private:
  static_assert(kGroupSlots == 2);
  std::mutex mutex_;
  std::condition_variable idle_;
  int count_[kGroupSlots] = {};
};

class LibraryGroup : public NcclGroup {
 public:
  LibraryGroup(const NcclGroupTable& table, Device& addon_device, Device& device, const NcclGroupOptions& options)
      : table_(table), addon_device_(addon_device), device_(device) {
    Failure failure;
    group_ = table_.open(device, options, failure);
    raise(failure);
  }
  ~LibraryGroup() override {
    if (group_ == nullptr) return;
    readers_->wait_all();
    table_.close(group_);
  }
  LibraryGroup(const LibraryGroup&) = delete;
  LibraryGroup& operator=(const LibraryGroup&) = delete;

  std::string describe() const override { return text(table_.describe); }
  std::string library() const override { return text(table_.library); }

  void connect(const uint8_t* id, GroupDeadline deadline) override {
    Failure failure;
    table_.connect(*group_, id, deadline, failure);
    raise(failure);
  }

  void stage(uint64_t bytes, int slots = kGroupSlots) override {
    readers_->wait_all();
    Failure failure;
    table_.stage(*group_, bytes, slots, failure);
    raise(failure);
  }

  StagedSlot staged(int slot) const override {
    StagedSlot out;
    Taken<Source> taken(out.source);
    Failure failure;
    table_.staged(*group_, slot, taken.sink(), failure);
    taken.finish(failure);
    readers_->begin(slot);
    out.memory = std::shared_ptr<const void>(&out, [readers = readers_, slot](const void*) { readers->end(slot); });
    return out;
  }

  void begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) override {
    wait_for_readers(slot, deadline);
    Failure failure;
    table_.begin(*group_, slot, parts, root, deadline, failure);
    raise(failure);
  }

  void begin_messages(int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline) override {
    wait_for_readers(slot, deadline);
    Failure failure;
    table_.begin_messages(*group_, slot, messages, deadline, failure);
    raise(failure);
  }

  std::vector<uint64_t> places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                               const std::vector<Rect>& rects, int set) const override {
    std::vector<uint64_t> out;
    Taken<std::vector<uint64_t>> taken(out);
    Failure failure;
    table_.places(*group_, parts, tensors, rects, set, taken.sink(), failure);
    taken.finish(failure);
    return out;
  }
  void arrive(GroupDeadline deadline) override {
    Failure failure;
    table_.arrive(*group_, deadline, failure);
    raise(failure);
  }

  void receive_in_place(const std::vector<GroupPart>& parts, int set, int root, GroupDeadline deadline) override {
    Failure failure;
    table_.receive_in_place(*group_, parts, set, root, deadline, failure);
    raise(failure);
  }

  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) override {
    std::vector<uint8_t> out(bytes);
    Failure failure;
    table_.read(*group_, slot, offset, out.data(), bytes, deadline, failure);
    raise(failure);
    return out;
  }

  void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) override {
    if (!readers_->wait(0, deadline)) {
      throw GroupError(GroupErrorKind::kTimeout, describe() + ", sending: a write still reads the slot");
    }
    Failure failure;
    table_.send(*group_, data, bytes, deadline, failure);
    raise(failure);
  }

  void params(Device& device, const CoreConfig& config, int rank, int set, int root, GroupDeadline deadline) override {
    if (&device != &addon_device_) throw std::invalid_argument(describe() + " is of another core");
    Failure failure;
    table_.params(*group_, device_, config, rank, set, root, deadline, failure);
    raise(failure);
  }

  void barrier(GroupDeadline deadline) override {
    Failure failure;
    table_.barrier(*group_, deadline, failure);
    raise(failure);
  }

  void abort(const std::string& reason) noexcept override { table_.abort(*group_, reason); }

  void end() noexcept override {
    readers_->wait_all();
    table_.end(*group_);
  }

 private:
  void wait_for_readers(int slot, GroupDeadline deadline) const {
    if (readers_->wait(slot, deadline)) return;
    throw GroupError(GroupErrorKind::kTimeout, describe() + ", receiving: a write still reads the slot");
  }

  std::string text(decltype(NcclGroupTable::describe) function) const {
    std::string out;
    Taken<std::string> taken(out);
    Failure failure;
    function(*group_, taken.sink(), failure);
    taken.finish(failure);
    return out;
  }

  const NcclGroupTable& table_;
  Device& addon_device_;
  Device& device_;
  NcclGroup* group_ = nullptr;
  const std::shared_ptr<Readers> readers_ = std::make_shared<Readers>();
};

}  // namespace

std::unique_ptr<NcclGroup> open_library_group(const NcclGroupTable& table, Device& addon_device, Device& device,
                                              const NcclGroupOptions& options) {
  return std::make_unique<LibraryGroup>(table, addon_device, device, options);
}

}  // namespace refit
