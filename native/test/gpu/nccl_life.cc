// The life of a communicator against native/test/nccl_stand_in.cc: joining, waiting, giving up, ending. Built and run
// by test/native/nccl.test.ts. Argument: the stand-in's file.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "cuda/group/nccl.h"
#include "test/check.h"

using namespace refit::cuda;

// The stand-in's declaration.
struct StandIn {
  int polls_to_join = 0, polls_of_group = 0, polls_to_finish = 0;
  int join_result = 0, call_result = 0, state_result = 0;
  int joined = 0, aborted = 0, finalized = 0, polled = 0, depth = 0, groups = 0;
  int ranks = 0, rank = 0;
  char id = 0;
  char call[32] = {};
  const void *from = nullptr, *to = nullptr, *stream = nullptr;
  size_t count = 0;
  int type = -1, other = -1;
};

namespace {

using Clock = std::chrono::steady_clock;

StandIn* stub = nullptr;

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class F>
std::string message_of(F&& fn, int* result = nullptr) {
  try {
    fn();
  } catch (const NcclError& error) {
    if (result != nullptr) *result = error.result;
    return error.what();
  }
  return "(no exception)";
}

void expect(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) CHECKF(has(message, part), "\"%s\" misses \"%s\"", message.c_str(), part);
}

// Every communicator that was created has been ended exactly once.
void expect_none_left() {
  CHECKF(stub->joined == stub->aborted, "%d joined, %d aborted", stub->joined, stub->aborted);
  CHECK(stub->depth == 0);
}

void test_life(const NcclApi& api) {
  *stub = {};
  stub->polls_to_join = 100, stub->polls_to_finish = 3;
  const NcclUniqueId id = new_nccl_id(api);
  {
    NcclComm comm(api, id, 4, 3, {10});
    CHECK(stub->joined == 1 && stub->ranks == 4 && stub->rank == 3 && stub->id == 0x5a);
    CHECKF(stub->polled == 101, "%d polls", stub->polled);
    comm.finish();
    CHECK(stub->finalized == 1 && stub->aborted == 1);
    comm.finish();
    comm.abort();
  }
  CHECK(stub->finalized == 1 && stub->aborted == 1);
  { NcclComm comm(api, id, 1, 0, {10}); }
  CHECK(stub->finalized == 1 && stub->aborted == 2);
}

void test_never(const NcclApi& api) {
  *stub = {};
  stub->polls_to_join = -1;
  auto began = Clock::now();
  int result = -1;
  expect(message_of([&] { NcclComm comm(api, {}, 2, 0, {0.3}); }, &result),
         {"rank 0 of 2, joining the communicator: not done after 0.3 s", "has not come", "NCCL_DEBUG=INFO", "NCCL "});
  CHECK(result == kNcclInProgress);
  CHECKF(since(began) >= 0.3 && since(began) < 5, "%g s", since(began));
  expect_none_left();

  std::atomic<bool> cancel{false};
  began = Clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cancel = true;
  });
  expect(message_of([&] { NcclComm comm(api, {}, 2, 1, {1000, &cancel}); }), {"rank 1 of 2", "given up after 0."});
  CHECKF(since(began) < 5, "%g s", since(began));
  other.join();
  expect_none_left();

  stub->polls_to_join = 0, stub->polls_to_finish = -1;
  NcclComm comm(api, {}, 2, 0, {0.1});
  expect(message_of([&] { comm.finish(); }), {"ncclCommFinalize: not done after 0.1 s"});
  expect_none_left();
}

void test_failures(const NcclApi& api) {
  *stub = {};
  int result = -1;
  stub->join_result = 1;
  expect(message_of([&] { NcclComm comm(api, {}, 2, 0, {10}); }, &result),
         {"joining the communicator: unhandled cuda error (reported by the stand-in)"});
  CHECK(result == kNcclUnhandledCudaError && stub->joined == 0 && stub->aborted == 0);

  // It fails while we wait.
  *stub = {};
  stub->polls_to_join = -1, stub->state_result = 6;
  expect(message_of([&] { NcclComm comm(api, {}, 2, 0, {10}); }, &result), {"joining", "remote process exited"});
  CHECK(result == kNcclRemoteError);
  expect_none_left();

  *stub = {};
  {
    NcclComm comm(api, {}, 2, 0, {10});
    comm.check();
    stub->state_result = 6;
    expect(message_of([&] { comm.check(); }), {"had been joined: remote process exited"});
    stub->state_result = 0;
    stub->call_result = 1;
    expect(message_of([&] { new_nccl_id(api); }), {"made no id", "unhandled cuda error"});
    expect(message_of([&] { comm.send(nullptr, 1, kNcclUint8, 1, nullptr); }), {"ncclSend: unhandled"});
    // A group that fails while its calls are collected is ended all the same.
    expect(message_of([&] { comm.group([&] { comm.recv(nullptr, 1, kNcclUint8, 1, nullptr); }); }), {"ncclRecv"});
    CHECK(stub->depth == 0 && stub->groups == 1);
    stub->call_result = 0;
    CHECK_THROWS(comm.group([] { throw std::out_of_range("mine"); }), std::out_of_range);
    CHECK(stub->depth == 0 && stub->groups == 2);
  }
  expect_none_left();
}

void test_calls(const NcclApi& api) {
  *stub = {};
  char a = 0, b = 0;
  auto* const stream = reinterpret_cast<NcclStream>(&stub);
  {
    NcclComm comm(api, {}, 2, 0, {10});
    const auto was = [&](const char* call, const void* from, const void* to, size_t count, int type, int other) {
      CHECKF(std::strcmp(stub->call, call) == 0 && stub->from == from && stub->to == to && stub->count == count &&
                 stub->type == type && stub->other == other && stub->stream == stream,
             "%s: count %zu, type %d, other %d", stub->call, stub->count, stub->type, stub->other);
    };
    comm.send(&a, 5, kNcclFloat32, 1, stream), was("send", &a, nullptr, 5, 7, 1);
    comm.recv(&b, 6, kNcclBfloat16, 3, stream), was("recv", nullptr, &b, 6, 9, 3);
    comm.broadcast(&a, &b, size_t{1} << 40, kNcclUint8, 2, stream), was("broadcast", &a, &b, size_t{1} << 40, 1, 2);
    comm.all_reduce(&a, &b, 8, kNcclFloat16, kNcclMax, stream), was("allReduce", &a, &b, 8, 6, 2);
    comm.all_gather(&a, &b, 9, kNcclInt64, stream), was("allGather", &a, &b, 9, 4, -1);
    // Calls that continue in the background are waited for: after a call, and after a group but not within it.
    stub->polls_of_group = 70, stub->polled = 0;
    comm.broadcast(&a, &b, 1, kNcclUint8, 0, stream);
    CHECKF(stub->polled == 71, "%d polls", stub->polled);
    stub->polled = 0;
    comm.group([&] {
      comm.send(&a, 1, kNcclUint8, 1, stream);
      comm.recv(&b, 1, kNcclUint8, 1, stream);
      CHECK(stub->polled == 0 && stub->depth == 1);
    });
    CHECKF(stub->polled == 71 && stub->depth == 0, "%d polls", stub->polled);
    // When the waiting time is over, a pending call is an error.
    stub->polls_of_group = -1;
    comm.set_wait({0.1});
    expect(message_of([&] { comm.group([&] { comm.send(&a, 1, kNcclUint8, 1, stream); }); }),
           {"ncclGroupEnd: not done after 0.1 s"});
    comm.abort();
    expect(message_of([&] { comm.check(); }), {"ncclCommGetAsyncError"});
  }
  expect_none_left();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const NcclApi* api = nullptr;
  try {
    api = &open_nccl(argv[1]);
  } catch (const std::runtime_error& error) {
    std::printf("refused: %s\n", error.what());
    return 3;
  }
  CHECK(&open_nccl(argv[1]) == api);
  const char* const multicast = std::getenv("NCCL_NVLS_ENABLE");
  std::printf("%s, %s, NCCL_NVLS_ENABLE=%s\n", api->name().c_str(), api->path.c_str(), multicast ? multicast : "");
  void* const handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  stub = static_cast<StandIn*>(dlsym(handle, "stand_in"));
  test_life(*api);
  test_never(*api);
  test_failures(*api);
  test_calls(*api);
  return refit::test::finish("nccl_life");
}
