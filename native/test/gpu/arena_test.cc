// GPU memory by tag: released memory goes back to the GPU and is resumed at the same address. Arguments: [--quick]
// [--bench] [seed].
#include "cuda/device/arena.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "core/memory_error.h"
#include "cuda/device/driver.h"
#include "test/check.h"
#include "test/gpu/kernels/device_kernels.h"

namespace refit::cuda {
namespace {

size_t free_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

void write_all(const Arena& arena, uint64_t key) {
  test::fill_words(512, reinterpret_cast<uint64_t*>(arena.data()), arena.bytes() / 8, key, nullptr);
  check_launch("fill");
  check(cudaDeviceSynchronize(), "fill");
}

unsigned long long wrong_words(const Arena& arena, uint64_t key) {
  unsigned long long* wrong = nullptr;
  check(cudaMalloc(&wrong, sizeof *wrong), "cudaMalloc");
  check(cudaMemset(wrong, 0, sizeof *wrong), "cudaMemset");
  test::count_wrong_words(reinterpret_cast<const uint64_t*>(arena.data()), arena.bytes() / 8, key, wrong);
  check_launch("count_wrong");
  unsigned long long count = 0;
  check(cudaMemcpy(&count, wrong, sizeof count, cudaMemcpyDeviceToHost), "count_wrong");
  cudaFree(wrong);
  return count;
}

// Sizes around the mapping granularity.
void test_sizes(bool quick) {
  const size_t chunk = Arena::kChunk;
  std::vector<size_t> sizes{8, 256, 4096, (2 << 20) - 8, 2 << 20, (2 << 20) + 8};
  if (!quick) sizes.insert(sizes.end(), {chunk - 8, chunk, chunk + 8, 3 * chunk + (6 << 20) + 40});
  for (const size_t size : sizes) {
    const size_t before = free_bytes();
    {
      Arena arena(0, size, {0});
      CHECKF(arena.bytes() == size && arena.resident() && arena.data() != nullptr, "size %zu", size);
      CHECKF(reinterpret_cast<uintptr_t>(arena.data()) % (2 << 20) == 0, "size %zu", size);
      write_all(arena, size);
      CHECKF(wrong_words(arena, size) == 0, "size %zu", size);
      const size_t taken = before - free_bytes();
      CHECKF(taken >= size && taken <= Arena::footprint(size) + (4 << 20), "size %zu took %zu", size, taken);
    }
    const size_t after = free_bytes();
    CHECKF(after + (4 << 20) >= before, "size %zu: %zu bytes free before, %zu after", size, before, after);
  }
}

void test_release(size_t size, int rounds) {
  Arena arena(0, size, {0});
  uint8_t* const address = arena.data();
  const size_t resident = free_bytes();
  size_t flat = 0;
  for (int round = 0; round < rounds; round++) {
    write_all(arena, round);
    const size_t bytes = arena.release();
    CHECKF(bytes >= size, "round %d gave back %zu of %zu", round, bytes, size);
    CHECK(!arena.resident() && arena.data() == address && arena.bytes() == size);
    CHECKF(arena.release() == 0, "round %d: released twice", round);
    const size_t released = free_bytes();
    CHECKF(released - resident >= size / 100 * 99, "round %d: %zu bytes came free of %zu", round, released - resident,
           size);
    if (round == 1) flat = released;
    CHECKF(round < 2 || released == flat, "round %d: %zu bytes free, %zu before", round, released, flat);
    arena.resume();
    arena.resume();
    CHECK(arena.resident() && arena.data() == address);
    write_all(arena, ~round);
    CHECKF(wrong_words(arena, ~round) == 0, "round %d", round);
  }
}

// A graph that was captured before still works after the memory behind the same address is replaced.
void test_graph() {
  Arena arena(0, 8 << 20, {0});
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  test::fill_words(64, reinterpret_cast<uint64_t*>(arena.data()), arena.bytes() / 8, 77, stream);
  cudaGraph_t graph;
  check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t exec;
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int round = 0; round < 3; round++) {
    write_all(arena, 1);
    check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaStreamSynchronize(stream), "launch");
    CHECKF(wrong_words(arena, 77) == 0, "round %d", round);
    arena.release();
    arena.resume();
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

void test_carve() {
  Arena arena(0, 1000, {0});
  void* const a = arena.carve(1);
  void* const b = arena.carve(300);
  CHECK(a == arena.data() && static_cast<uint8_t*>(b) == arena.data() + 256);
  CHECK(arena.carve(0) == arena.data() + 768);
  CHECK(arena.carve(200) == arena.data() + 768);
  CHECK_THROWS(arena.carve(1), std::bad_alloc);
  CHECK_THROWS(arena.carve(~size_t{0}), std::bad_alloc);
  Arena none;
  CHECK(none.data() == nullptr && none.bytes() == 0 && none.release() == 0);
  const Arena empty(0, 0, {0});
  CHECK(empty.resident() && empty.data() == nullptr);
  Arena moved = std::move(arena);
  CHECK(moved.bytes() == 1000 && moved.resident() && arena.data() == nullptr);
}

void test_full() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  std::string message;
  try {
    Arena arena(0, total + (size_t{1} << 30), {0});
  } catch (const NoMemory& e) {
    message = e.what();
  }
  CHECKF(message.find("GPU 0 is full") == 0 && message.find(" are free") != std::string::npos, "%s", message.c_str());
  CHECKF(free_bytes() + (4 << 20) >= free, "%zu bytes free before, %zu after", free, free_bytes());
  CHECKF(cudaGetLastError() == cudaSuccess, "the error of the allocation is left behind");
  // Released, while another arena takes its memory.
  Arena arena(0, size_t{256} << 20, {0});
  arena.release();
  void* other = nullptr;
  const size_t take = free_bytes() - (size_t{100} << 20);
  if (cudaMalloc(&other, take) == cudaSuccess) {
    message.clear();
    try {
      arena.resume();
    } catch (const NoMemory& e) {
      message = e.what();
    }
    CHECKF(!message.empty() && !arena.resident(), "%s", message.c_str());
    check(cudaFree(other), "cudaFree");
  } else {
    cudaGetLastError();
    std::printf("the GPU was too full to test a resume on a full GPU\n");
  }
  arena.resume();
  write_all(arena, 5);
  CHECK(wrong_words(arena, 5) == 0);
}

// Written by one GPU and read by the other, before and after a release.
void test_peers() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  int can = 0;
  if (count > 1) check(cudaDeviceCanAccessPeer(&can, 1, 0), "cudaDeviceCanAccessPeer");
  if (can == 0) {
    std::printf("one GPU, or GPUs that do not reach each other: peers were not tested\n");
    return;
  }
  Arena arena(0, size_t{300} << 20, {0, 1});
  for (int round = 0; round < 3; round++) {
    write_all(arena, round);
    {
      const CurrentDevice other(1);
      CHECKF(wrong_words(arena, round) == 0, "round %d: GPU 1 reads", round);
      write_all(arena, round + 100);
    }
    CHECKF(wrong_words(arena, round + 100) == 0, "round %d: GPU 1 wrote", round);
    arena.release();
    arena.resume();
  }
}

void bench() {
  for (const size_t gigabytes : {1, 4, 16}) {
    if (free_bytes() < (gigabytes + 2) << 30) continue;
    Arena arena(0, gigabytes << 30, {0});
    double release = 1e9, resume = 1e9;
    for (int i = 0; i < 5; i++) {
      write_all(arena, i);
      const auto a = std::chrono::steady_clock::now();
      arena.release();
      const auto b = std::chrono::steady_clock::now();
      arena.resume();
      const auto c = std::chrono::steady_clock::now();
      release = std::min(release, std::chrono::duration<double, std::milli>(b - a).count());
      resume = std::min(resume, std::chrono::duration<double, std::milli>(c - b).count());
    }
    std::printf("%2zu GB: release %.2f ms, resume %.2f ms\n", gigabytes, release, resume);
  }
}

}  // namespace
}  // namespace refit::cuda

int main(int argc, char** argv) {
  using namespace refit::cuda;
  bool quick = false, timing = false;
  for (int i = 1; i < argc; i++) {
    quick |= std::strcmp(argv[i], "--quick") == 0;
    timing |= std::strcmp(argv[i], "--bench") == 0;
  }
  check(cudaSetDevice(0), "cudaSetDevice");
  wrong_words(Arena(0, 8, {0}), 0);  // memory that CUDA takes for itself at the first launch
  test_sizes(quick);
  test_carve();
  test_release(quick ? 20 << 20 : (size_t{1} << 30) + (2 << 20), quick ? 3 : 50);
  test_graph();
  if (!quick) {
    test_full();
    test_peers();
  }
  if (timing) bench();
  return refit::test::finish("arena_test");
}
