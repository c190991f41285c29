#include "cuda/group/group_channel.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>

#include "core/elapsed.h"
#include "core/look.h"

namespace refit::cuda {
namespace {

constexpr uint64_t kChannelAlignment = 512;
constexpr uint64_t kScalarBytes = 512;
// How long kernels of an aborted communicator may take to leave the GPU.
constexpr double kLeaveSeconds = 10;

// Short waits only yield the processor, because broadcasts of a model need quick reactions while processors are free.
// Longer waits sleep.
void pause(int turn) {
  static const int looks = is_roomy() ? 20000 : 256;
  if (turn < looks) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Marks are set after every so many parts; the last mark stands behind all parts.
size_t stride_of(size_t parts) { return std::max<size_t>(1, (parts + GroupGpu::kMarks - 1) / GroupGpu::kMarks); }
size_t marks_of(size_t parts) { return std::max<size_t>(1, (parts + stride_of(parts) - 1) / stride_of(parts)); }

// " 3 messages of ranks 0, 2"; NCCL does not report which of them are missing.
std::string senders_of(const std::vector<GroupMessage>& messages) {
  std::set<int> ranks;
  for (const GroupMessage& message : messages) ranks.insert(message.from);
  std::string text = " " + std::to_string(messages.size()) + (messages.size() == 1 ? " message" : " messages");
  const char* before = ranks.size() == 1 ? " of rank " : " of ranks ";
  for (const int rank : ranks) {
    text += before + std::to_string(rank);
    before = ", ";
  }
  return text;
}

// Calls that run one at a time use this set; broadcasts that are received ahead take the other sets in turns.
constexpr int kOneSet = GroupGpu::kMarkSets - 1;

}  // namespace

double GroupWait::seconds() const {
  return std::max(0.0, std::chrono::duration<double>(deadline - Clock::now()).count());
}

template <class F>
void GroupChannel::guarded(F&& fn) {
  try {
    fn();
  } catch (...) {
    abandon();
    throw;
  }
}

// Ends the kernels, so that the memory can be freed.
void GroupChannel::abandon() noexcept {
  coming_.clear();
  try {
    gpu_->doing("abort NCCL's communicator");
    if (comm_) comm_->abort();
    gpu_->doing("wait for NCCL's kernels to end");
    const auto began = Clock::now();
    for (int turn = 0; !gpu_->idle() && seconds_since(began) < kLeaveSeconds; turn++) pause(turn);
  } catch (...) {
    // The call that failed reports the GPU's error.
  }
}

void GroupChannel::join(const NcclApi& api, const NcclUniqueId& id, int size, const GroupWait& wait) {
  gpu_->doing("join a group of NCCL");
  scalar_ = gpu_->allocate(kScalarBytes);
  const float zero = 0;
  gpu_->upload(scalar_, reinterpret_cast<const uint8_t*>(&zero), sizeof zero);
  guarded([&] { comm_ = std::make_unique<NcclComm>(api, id, size, rank_, wait.nccl()); });
}

void GroupChannel::stage(uint64_t bytes, int slots) {
  gpu_->doing("staging slots of a group");
  if (slots_ != nullptr) gpu_->free(slots_);
  slots_ = nullptr;
  slot_bytes_ = 0;
  if (bytes == 0) return;
  const uint64_t each = (bytes + kChannelAlignment - 1) / kChannelAlignment * kChannelAlignment;
  slots_ = gpu_->allocate(static_cast<uint64_t>(slots) * each);
  slot_bytes_ = each;
}

void GroupChannel::begin(int slot, const std::vector<GroupPart>& parts, int root, const GroupWait& wait) {
  gpu_->doing("receive a broadcast");
  std::vector<GroupSpan> spans;
  for (const GroupPart& part : parts) spans.push_back({slot_data(slot) + part.offset, part.bytes, 0});
  const Flight flight{"receiving", next_set_, parts.size(), root};
  next_set_ = (next_set_ + 1) % kOneSet;
  guarded([&] { launch(flight, spans, wait); });
  coming_.push_back(flight);
}

void GroupChannel::begin_messages(const std::vector<GroupMessage>& messages, const GroupWait& wait) {
  gpu_->doing("receive messages");
  const Flight flight{"receiving", next_set_, 0, -1, senders_of(messages)};
  next_set_ = (next_set_ + 1) % kOneSet;
  guarded([&] {
    comm_->set_wait(wait.nccl());
    if (!messages.empty()) {
      comm_->group([&] {
        for (const GroupMessage& one : messages) comm_->recv(one.to, one.bytes, kNcclUint8, one.from, gpu_->stream());
      });
    }
    gpu_->mark(flight.set, 0);
  });
  coming_.push_back(flight);
}

void GroupChannel::arrive(const GroupWait& wait) {
  gpu_->doing("receive from other ranks");
  if (coming_.empty()) throw std::runtime_error("nothing is being received");
  const Flight flight = coming_.front();
  coming_.pop_front();
  guarded([&] { await(flight, wait); });
}

void GroupChannel::give_up() noexcept {
  if (!coming_.empty()) abandon();
}

std::vector<uint8_t> GroupChannel::read(int slot, uint64_t offset, uint64_t bytes) {
  gpu_->doing("read what was received");
  std::vector<uint8_t> out(bytes);
  guarded([&] { gpu_->download(out.data(), slot_data(slot) + offset, bytes); });
  return out;
}

void GroupChannel::send(const uint8_t* from, uint64_t bytes, const GroupWait& wait) {
  gpu_->doing("send a broadcast");
  const Flight flight{"sending", kOneSet, 1, rank_};
  guarded([&] {
    gpu_->upload(slots_, from, bytes);
    launch(flight, {{slots_, bytes, 0}}, wait);
    await(flight, wait);
  });
}

void GroupChannel::broadcast(const std::vector<GroupSpan>& spans, int root, const GroupWait& wait) {
  gpu_->doing("broadcast parameters");
  const Flight flight{root == rank_ ? "sending parameters" : "receiving parameters", kOneSet, spans.size(), root};
  guarded([&] {
    launch(flight, spans, wait);
    await(flight, wait);
  });
}

void GroupChannel::barrier(const GroupWait& wait) {
  gpu_->doing("wait for all ranks of a group");
  guarded([&] {
    comm_->set_wait(wait.nccl());
    comm_->all_reduce(scalar_, scalar_, 1, kNcclFloat32, kNcclSum, gpu_->stream());
    gpu_->mark(kOneSet, 0);
    await({"the barrier", kOneSet, 0, -1}, wait);
  });
}

void GroupChannel::launch(const Flight& flight, const std::vector<GroupSpan>& spans, const GroupWait& wait) {
  const size_t stride = stride_of(spans.size());
  int marks = 0;
  for (size_t i = 0; i < spans.size(); i++) {
    const GroupSpan& span = spans[i];
    comm_->set_wait(wait.nccl());
    // NCCL skips an empty broadcast on all ranks.
    if (span.bytes > 0) comm_->broadcast(span.data, span.data, span.bytes, kNcclUint8, flight.root, gpu_->stream());
    if ((i + 1) % stride == 0 || i + 1 == spans.size()) gpu_->mark(flight.set, marks++);
  }
  if (marks == 0) gpu_->mark(flight.set, 0);
}

// NCCL's kernels wait for their peers on the GPU. The GPU does not notice that a peer has left or will not come.
void GroupChannel::await(const Flight& flight, const GroupWait& wait) {
  const auto began = Clock::now();
  const int last_mark = static_cast<int>(marks_of(flight.parts)) - 1;
  const auto where = [&] {
    std::string text = flight.what;
    if (flight.root >= 0 && flight.root != rank_) text += " from rank " + std::to_string(flight.root);
    text += flight.from;
    if (flight.parts > 0) {
      int passed = 0;
      while (passed < last_mark && gpu_->passed(flight.set, passed)) passed++;
      const size_t stride = stride_of(flight.parts);
      const size_t first = static_cast<size_t>(passed) * stride + 1;
      const size_t last = std::min(flight.parts, first + stride - 1);
      text += ", broadcast " + std::to_string(first) + (last > first ? " to " + std::to_string(last) : "") + " of " +
              std::to_string(flight.parts);
    }
    return text;
  };
  for (int turn = 0; !gpu_->passed(flight.set, last_mark); turn++) {
    if (turn % 64 == 0) comm_->check();
    if (wait.cancelled()) {
      throw NcclError(kNcclInProgress, where() + ": given up after " + seconds_text(seconds_since(began)) + " s");
    }
    if (Clock::now() >= wait.deadline) {
      throw NcclError(kNcclInProgress, where() + ": not done after " + seconds_text(seconds_since(began)) + " s");
    }
    pause(turn);
  }
  comm_->check();  // kernels that NCCL has given up end, too
}

void GroupChannel::close(bool abort, double seconds) noexcept {
  try {
    gpu_->doing("leave a group of NCCL");
    if (comm_ && !abort) {
      comm_->set_wait({seconds, nullptr});
      comm_->finish();
    } else {
      abandon();
    }
  } catch (...) {
    abandon();
  }
  comm_.reset();
  gpu_->doing("free a group's memory");
  for (uint8_t** memory : {&scalar_, &slots_}) {
    if (*memory != nullptr) gpu_->free(*memory);
    *memory = nullptr;
  }
  slot_bytes_ = 0;
}

}  // namespace refit::cuda
