// A shared library with NCCL's C interface whose ranks are threads of one process, and whose streams are LoopStreams.
// It copies bytes from rank to rank in host memory. Like NCCL, it waits for ranks that are late, waits for ever for
// ranks that never join, and can be aborted. Communicators do not block. Built by test/native/nccl-groups.test.ts.
//
// As in NCCL, calls of different ranks are matched by order only: a broadcast whose size differs from the root's never
// ends.
#include "test/nccl_loop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

using refit::test::LoopControl;
using refit::test::LoopStream;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT LoopControl loop_control;
LoopControl loop_control;

namespace {

struct Id {
  char bytes[128];
};

struct Call {
  char kind = 0;  // 'b' broadcast, 's' sum
  int root = -1;
  size_t bytes = 0;
  std::vector<uint8_t> data;
  std::vector<float> sums;
  int arrived = 0, left = 0;
  bool sent = false;  // the root has arrived
  bool mismatch = false;
};

struct Message {
  std::vector<uint8_t> data;
  bool taken = false;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0;
  int joined = 0;
  std::vector<bool> there, aborted;
  std::map<uint64_t, Call> calls;                                                // by number
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages;  // by sender and receiver, in order
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<World>> worlds;
  uint64_t next = 1;
};
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<World> world;
  int rank = 0;
  uint64_t calls = 0;
  bool finalized = false;  // its own work is done: no other rank needs it
};

namespace {

bool others_gone(const World& world, int rank) {
  if (loop_control.deaf != 0) return false;
  for (int r = 0; r < world.size; r++) {
    if (r != rank && world.aborted[static_cast<size_t>(r)]) return true;
  }
  return false;
}

// Runs on a stream and takes part in call `number`.
void take_part(World& world, int rank, uint64_t number, const Call& mine, const uint8_t* from, uint8_t* to) {
  std::unique_lock lock(world.mutex);
  const auto gone = [&] { return static_cast<bool>(world.aborted[static_cast<size_t>(rank)]); };
  if (gone()) return;
  Call& call = world.calls[number];
  if (call.arrived == 0) {
    call.kind = mine.kind, call.root = mine.root, call.bytes = mine.bytes;
  } else if (call.kind != mine.kind || call.root != mine.root || call.bytes != mine.bytes) {
    call.mismatch = true;
  }
  call.arrived++;
  if (mine.kind == 'b' && rank == mine.root) {
    call.data.assign(from, from + mine.bytes);
    call.sent = true;
  }
  if (mine.kind == 's') {
    const auto* const values = reinterpret_cast<const float*>(from);
    call.sums.resize(mine.bytes / sizeof(float));
    for (size_t i = 0; i < call.sums.size(); i++) call.sums[i] += values[i];
  }
  world.changed.notify_all();
  world.changed.wait(lock, [&] { return gone() || (!call.mismatch && (call.arrived == world.size || call.sent)); });
  if (gone()) return;
  if (mine.kind == 's') std::memcpy(to, call.sums.data(), mine.bytes);
  if (mine.kind == 'b' && to != nullptr) std::memcpy(to, call.data.data(), mine.bytes);
  if (++call.left == world.size) world.calls.erase(number);
}

// A send or a receive; those of a group run together.
struct Transfer {
  bool sends = false;
  int peer = -1;
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  size_t bytes = 0;
};

struct Group {
  int depth = 0;
  ncclComm* comm = nullptr;
  void* stream = nullptr;
  std::vector<Transfer> transfers;
};
thread_local Group group;

// Runs on a stream. All transfers progress together; those of a pair of ranks in their order. As in NCCL, a receive of
// another size than was sent never ends.
void transfer(World& world, int rank, const std::vector<Transfer>& transfers) {
  std::unique_lock lock(world.mutex);
  const auto gone = [&] { return static_cast<bool>(world.aborted[static_cast<size_t>(rank)]); };
  if (gone()) return;
  std::vector<std::shared_ptr<Message>> sent;
  for (const Transfer& one : transfers) {
    if (!one.sends) continue;
    sent.push_back(std::make_shared<Message>());
    sent.back()->data.assign(one.from, one.from + one.bytes);
    world.messages[{rank, one.peer}].push_back(sent.back());
  }
  world.changed.notify_all();
  for (const Transfer& one : transfers) {
    if (one.sends) continue;
    auto& queue = world.messages[{one.peer, rank}];
    world.changed.wait(lock, [&] { return gone() || (!queue.empty() && queue.front()->data.size() == one.bytes); });
    if (gone()) return;
    std::memcpy(one.to, queue.front()->data.data(), one.bytes);
    queue.front()->taken = true;
    queue.pop_front();
    world.changed.notify_all();
  }
  world.changed.wait(lock, [&] {
    return gone() || std::all_of(sent.begin(), sent.end(), [](const auto& one) { return one->taken; });
  });
}

int post_group() {
  Group own;
  std::swap(own, group);
  if (own.comm == nullptr) return 0;
  static_cast<LoopStream*>(own.stream)->post([world = own.comm->world, rank = own.comm->rank, own] {
    transfer(*world, rank, own.transfers);
  });
  return 0;
}

int add_transfer(ncclComm* comm, void* stream, const Transfer& one) {
  if (comm == nullptr || stream == nullptr || one.peer < 0 || one.peer >= comm->world->size) return 4;
  if (group.comm != nullptr && group.comm != comm) return 5;
  group.comm = comm, group.stream = stream;
  group.transfers.push_back(one);
  return group.depth == 0 ? post_group() : 0;
}

int start(ncclComm* comm, char kind, const void* from, void* to, size_t bytes, int root, void* stream) {
  if (comm == nullptr || stream == nullptr) return 4;
  if (bytes == 0) return 0;
  Call mine;
  mine.kind = kind, mine.root = root, mine.bytes = bytes;
  const uint64_t number = comm->calls++;
  static_cast<LoopStream*>(stream)->post([world = comm->world, rank = comm->rank, number, mine, from, to] {
    take_part(*world, rank, number, mine, static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to));
  });
  return 0;
}

size_t size_of_type(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

int end_comm(ncclComm* comm) {
  if (comm == nullptr) return 4;
  {
    const std::lock_guard lock(comm->world->mutex);
    if (!comm->finalized) comm->world->aborted[static_cast<size_t>(comm->rank)] = true;
    comm->world->changed.notify_all();
  }
  delete comm;
  const std::lock_guard lock(registry().mutex);
  loop_control.live--;
  return 0;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
EXPORT int ncclGetUniqueId(Id* id) {
  const std::lock_guard lock(registry().mutex);
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::strcpy(id->bytes, ("loop " + std::to_string(registry().next++)).c_str());
  return 0;
}
EXPORT int ncclCommInitRankConfig(ncclComm** out, int ranks, Id id, int rank, const int*) {
  if (rank < 0 || rank >= ranks) return 4;
  const std::lock_guard lock(registry().mutex);
  *out = nullptr;
  if (loop_control.join_fails != nullptr) return 5;
  const std::string key(id.bytes, sizeof id.bytes);
  std::shared_ptr<World> world = registry().worlds[key].lock();
  if (!world) {
    world = std::make_shared<World>();
    world->size = ranks;
    world->there.resize(static_cast<size_t>(ranks));
    world->aborted.resize(static_cast<size_t>(ranks));
    registry().worlds[key] = world;
  }
  const std::lock_guard inner(world->mutex);
  if (world->size != ranks || world->there[static_cast<size_t>(rank)]) return 5;
  world->there[static_cast<size_t>(rank)] = true;
  world->joined++;
  *out = new ncclComm{world, rank, 0};
  loop_control.live++;
  return 7;
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* result) {
  if (comm == nullptr) return 4;
  const std::lock_guard lock(comm->world->mutex);
  *result = others_gone(*comm->world, comm->rank) ? 6 : comm->world->joined < comm->world->size ? 7 : 0;
  return 0;
}
EXPORT int ncclCommFinalize(ncclComm* comm) {
  comm->finalized = true;
  return 0;
}
EXPORT int ncclCommAbort(ncclComm* comm) { return end_comm(comm); }
EXPORT const char* ncclGetErrorString(int result) {
  return result == 6 ? "remote process exited or there was a network error" : result == 5 ? "invalid usage" : "?";
}
EXPORT const char* ncclGetLastError(ncclComm*) {
  return loop_control.join_fails == nullptr ? "" : loop_control.join_fails;
}
EXPORT int ncclGroupStart() {
  group.depth++;
  return 0;
}
EXPORT int ncclGroupEnd() {
  if (group.depth == 0) return 5;
  return --group.depth == 0 ? post_group() : 0;
}
EXPORT int ncclSend(const void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  return add_transfer(comm, stream,
                      {true, peer, static_cast<const uint8_t*>(data), nullptr, count * size_of_type(type)});
}
EXPORT int ncclRecv(void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  return add_transfer(comm, stream, {false, peer, nullptr, static_cast<uint8_t*>(data), count * size_of_type(type)});
}
EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm* comm, void* stream) {
  return start(comm, 'b', from, to, count * size_of_type(type), root, stream);
}
EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm* comm, void* stream) {
  if (type != 7 || op != 0) return 4;
  return start(comm, 's', from, to, count * sizeof(float), -1, stream);
}
EXPORT int ncclAllGather(const void*, void*, size_t, int, ncclComm*, void*) { return 4; }
