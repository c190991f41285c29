// A shared library with NCCL's C interface that moves no byte: it records its calls and returns the results that the
// test has set, so tests of waits, aborts and failures need no GPU. Built by test/native/nccl.test.ts, which sets
// VERSION (22809) and, for a library that lacks a function, WITHOUT_RECV.
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace {

// As in nccl.h of 2.18; written independently of cuda/group/nccl_api.h, which is under test.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char* net;
  int split, traffic;
};

struct Id {
  char bytes[128];
};

}  // namespace

struct ncclComm {
  int polls;  // number of polls until the pending call ends; below 0: never
  int result;
};

// The settings that the test writes and reads.
struct StandIn {
  int polls_to_join = 0, polls_of_group = 0, polls_to_finish = 0;  // below 0: never
  int join_result = 0, call_result = 0, state_result = 0;
  int joined = 0, aborted = 0, finalized = 0, polled = 0, depth = 0, groups = 0;
  int ranks = 0, rank = 0;
  char id = 0;
  char call[32] = {};
  const void *from = nullptr, *to = nullptr, *stream = nullptr;
  size_t count = 0;
  int type = -1, other = -1;  // peer, root or operation
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT StandIn stand_in;
StandIn stand_in;

namespace {

std::mutex mutex;

int called(const char* name, const void* from, const void* to, size_t count, int type, int other, ncclComm* comm,
           const void* stream) {
  const std::lock_guard lock(mutex);
  std::strncpy(stand_in.call, name, sizeof stand_in.call - 1);
  stand_in.from = from, stand_in.to = to, stand_in.count = count, stand_in.type = type, stand_in.other = other;
  stand_in.stream = stream;
  if (comm == nullptr) return 4;
  if (stand_in.call_result != 0) return stand_in.call_result;
  if (stand_in.depth > 0) return 0;
  comm->polls = stand_in.polls_of_group;
  return comm->polls == 0 ? 0 : 7;
}

ncclComm* grouped = nullptr;

// The configuration of 2.14 to 2.17 is shorter.
bool good(const Config& c) {
  const size_t size = VERSION < 21700 ? 24 : VERSION < 21800 ? 40 : 48;
  if (c.size != size || c.magic != 0xcafebeef || c.blocking != 0) return false;
  if (static_cast<int>(c.version) != (VERSION < 21800 ? VERSION : 21800)) return false;
  return c.cga == INT_MIN && c.min_ctas == INT_MIN && c.max_ctas == INT_MIN && c.net == nullptr && c.split == INT_MIN &&
         c.traffic == INT_MIN;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = VERSION;
  return 0;
}
EXPORT int ncclGetUniqueId(Id* id) {
  std::memset(id->bytes, 0x5a, sizeof id->bytes);
  return stand_in.call_result;
}
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int ranks, Id id, int rank, Config* config) {
  const std::lock_guard lock(mutex);
  *comm = nullptr;
  if (!good(*config) || rank < 0 || rank >= ranks) return 4;
  if (stand_in.join_result != 0) return stand_in.join_result;
  stand_in.joined++, stand_in.ranks = ranks, stand_in.rank = rank, stand_in.id = id.bytes[127];
  *comm = new ncclComm{stand_in.polls_to_join, 0};
  return stand_in.polls_to_join == 0 ? 0 : 7;
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* result) {
  const std::lock_guard lock(mutex);
  if (comm == nullptr) return 4;
  stand_in.polled++;
  *result = stand_in.state_result;
  if (stand_in.state_result != 0 || comm->polls == 0) return 0;
  if (comm->polls > 0) comm->polls--;
  *result = 7;
  return 0;
}
EXPORT int ncclCommFinalize(ncclComm* comm) {
  const std::lock_guard lock(mutex);
  stand_in.finalized++;
  comm->polls = stand_in.polls_to_finish;
  return comm->polls == 0 ? 0 : 7;
}
EXPORT int ncclCommAbort(ncclComm* comm) {
  const std::lock_guard lock(mutex);
  stand_in.aborted++;
  delete comm;
  return 0;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == 1   ? "unhandled cuda error"
         : result == 6 ? "remote process exited or there was a network error"
                       : "?";
}
EXPORT const char* ncclGetLastError(ncclComm*) { return "reported by the stand-in\n"; }
EXPORT int ncclGroupStart() {
  const std::lock_guard lock(mutex);
  stand_in.depth++;
  return 0;
}
EXPORT int ncclGroupEnd() {
  const std::lock_guard lock(mutex);
  stand_in.depth--;
  stand_in.groups++;
  if (grouped == nullptr) return stand_in.call_result;
  grouped->polls = stand_in.polls_of_group;
  grouped = nullptr;
  return stand_in.polls_of_group == 0 ? 0 : 7;
}
EXPORT int ncclSend(const void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  if (stand_in.depth > 0) grouped = comm;
  return called("send", data, nullptr, count, type, peer, comm, stream);
}
#ifndef WITHOUT_RECV
EXPORT int ncclRecv(void* data, size_t count, int type, int peer, ncclComm* comm, void* stream) {
  if (stand_in.depth > 0) grouped = comm;
  return called("recv", nullptr, data, count, type, peer, comm, stream);
}
#endif
EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm* comm, void* stream) {
  return called("broadcast", from, to, count, type, root, comm, stream);
}
EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm* comm, void* stream) {
  return called("allReduce", from, to, count, type, op, comm, stream);
}
EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm* comm, void* stream) {
  return called("allGather", from, to, count, type, -1, comm, stream);
}
