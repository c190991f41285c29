// P1: memory behind fixed addresses (CUDA virtual memory management): the cost of mapping and unmapping it by chunk
// size, whether that waits for running kernels, and whether captured graphs still work after it was exchanged.
#include <algorithm>
#include <thread>
#include <vector>

#include "probe.h"

namespace {

using namespace refit::probe;

const auto mem_create = DRIVER(cuMemCreate);
const auto mem_release = DRIVER(cuMemRelease);
const auto mem_map = DRIVER(cuMemMap);
const auto mem_unmap = DRIVER(cuMemUnmap);
const auto mem_set_access = DRIVER(cuMemSetAccess);
const auto mem_reserve = DRIVER(cuMemAddressReserve);
const auto mem_address_free = DRIVER(cuMemAddressFree);
const auto mem_granularity = DRIVER(cuMemGetAllocationGranularity);

constexpr size_t kMega = 1 << 20;
constexpr size_t kGiga = 1 << 30;

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

using Chunks = std::vector<CUmemGenericAllocationHandle>;

Chunks create(size_t bytes, size_t chunk, int threads) {
  Chunks chunks(bytes / chunk);
  const CUmemAllocationProp prop = properties(0);
  const auto some = [&](int thread) {
    MUST(cudaSetDevice(0));
    for (size_t i = thread; i < chunks.size(); i += threads) MUST(mem_create(&chunks[i], chunk, &prop, 0));
  };
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; i++) pool.emplace_back(some, i);
  some(0);
  for (std::thread& thread : pool) thread.join();
  return chunks;
}

void map(CUdeviceptr base, const Chunks& chunks, size_t chunk) {
  for (size_t i = 0; i < chunks.size(); i++) MUST(mem_map(base + i * chunk, chunk, 0, chunks[i], 0));
}

// Access for all GPUs of the machine, as for an engine's arenas.
void set_access(CUdeviceptr base, size_t bytes, int devices) {
  std::vector<CUmemAccessDesc> access(devices);
  for (int i = 0; i < devices; i++) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = i;
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  MUST(mem_set_access(base, bytes, access.data(), access.size()));
}

void release(const Chunks& chunks) {
  for (const auto handle : chunks) MUST(mem_release(handle));
}

size_t free_bytes() {
  size_t free = 0, total = 0;
  MUST(cudaMemGetInfo(&free, &total));
  return free;
}

// ms per GB of each phase, best of three turns.
void costs(size_t bytes, size_t chunk, int devices, int threads) {
  CUdeviceptr base = 0;
  MUST(mem_reserve(&base, bytes, chunk, 0, 0));
  double best[5] = {1e9, 1e9, 1e9, 1e9, 1e9}, back = 1;
  for (int turn = 0; turn < 3; turn++) {
    const size_t before = free_bytes();
    Stopwatch created;
    const Chunks chunks = create(bytes, chunk, threads);
    best[0] = std::min(best[0], created.ms());
    Stopwatch mapped;
    map(base, chunks, chunk);
    best[1] = std::min(best[1], mapped.ms());
    Stopwatch allowed;
    set_access(base, bytes, devices);
    best[2] = std::min(best[2], allowed.ms());
    MUST(cudaMemset(reinterpret_cast<void*>(base), turn + 1, bytes));
    MUST(cudaDeviceSynchronize());
    Stopwatch unmapped;
    MUST(mem_unmap(base, bytes));
    best[3] = std::min(best[3], unmapped.ms());
    const size_t between = free_bytes();
    Stopwatch released;
    release(chunks);
    best[4] = std::min(best[4], released.ms());
    const size_t after = free_bytes();
    back = std::min(back, static_cast<double>(after - between) / bytes);
    if (after + 64 * kMega < before) std::fprintf(stderr, "%zu MB did not come back\n", (before - after) / kMega);
  }
  MUST(mem_address_free(base, bytes));
  char question[120];
  std::snprintf(question, sizeof question, "%.0f GiB in chunks of %zu MiB, %d thread%s creating, access for %d GPU%s",
                bytes / double(kGiga), chunk / kMega, threads, threads > 1 ? "s" : "", devices, devices > 1 ? "s" : "");
  row("P1", question, "create %.2f, map %.2f, set access %.2f ms; unmap %.2f, release %.2f ms; %.1f %% back", best[0],
      best[1], best[2], best[3], best[4], 100 * back);
}

__global__ void fill(uint32_t* out, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x)
    out[i] = seed + i;
}

__global__ void count_wrong(const uint32_t* in, size_t count, uint32_t seed, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    if (in[i] != seed + uint32_t(i)) atomicAdd(wrong, 1ull);
  }
}

__global__ void spin(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - start < ns);
}

unsigned long long wrong_elements(CUdeviceptr base, size_t bytes, uint32_t seed) {
  unsigned long long *counter, wrong = 0;
  MUST(cudaMalloc(&counter, sizeof wrong));
  MUST(cudaMemset(counter, 0, sizeof wrong));
  count_wrong<<<512, 256>>>(reinterpret_cast<uint32_t*>(base), bytes / 4, seed, counter);
  MUST(cudaGetLastError());
  MUST(cudaMemcpy(&wrong, counter, sizeof wrong, cudaMemcpyDeviceToHost));
  MUST(cudaFree(counter));
  return wrong;
}

void graphs(size_t bytes, size_t chunk, int devices) {
  CUdeviceptr base = 0;
  MUST(mem_reserve(&base, bytes, chunk, 0, 0));
  const Chunks first = create(bytes, chunk, 1);
  map(base, first, chunk);
  set_access(base, bytes, devices);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  fill<<<512, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(base), bytes / 4, 7);
  MUST(cudaGetLastError());
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  const auto replay = [&] {
    MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaStreamSynchronize(stream));
    return wrong_elements(base, bytes, 7);
  };
  const auto before = replay();
  // A second set of memory at the same addresses, while the first one keeps its bytes.
  MUST(mem_unmap(base, bytes));
  const Chunks second = create(bytes, chunk, 1);
  map(base, second, chunk);
  set_access(base, bytes, devices);
  const auto fresh = wrong_elements(base, bytes, 7);
  const auto after = replay();
  fill<<<512, 256>>>(reinterpret_cast<uint32_t*>(base), bytes / 4, 99);
  MUST(cudaDeviceSynchronize());
  row("P1", "a graph captured before its memory was exchanged replays into the new memory",
      "%s (wrong elements: %llu before, %llu after; new memory held %llu others)", before + after == 0 ? "yes" : "NO",
      before, after, fresh);
  MUST(mem_unmap(base, bytes));
  map(base, first, chunk);
  set_access(base, bytes, devices);
  const auto kept = wrong_elements(base, bytes, 7);
  MUST(mem_unmap(base, bytes));
  map(base, second, chunk);
  set_access(base, bytes, devices);
  const auto other = wrong_elements(base, bytes, 99);
  row("P1", "two sets of memory take turns at one address, each keeps its bytes", "%s (wrong elements: %llu, %llu)",
      kept + other == 0 ? "yes" : "NO", kept, other);
  MUST(mem_unmap(base, bytes));
  release(first);
  release(second);
  MUST(mem_address_free(base, bytes));
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaStreamDestroy(stream));
}

void waits(size_t chunk, int devices) {
  CUdeviceptr base = 0;
  MUST(mem_reserve(&base, chunk, chunk, 0, 0));
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const char* names[] = {"create", "map", "set access", "unmap", "release"};
  Chunks chunks;
  std::string answer;
  for (int phase = 0; phase < 5; phase++) {
    spin<<<1, 1, 0, stream>>>(100'000'000);
    MUST(cudaGetLastError());
    Stopwatch watch;
    if (phase == 0) chunks = create(chunk, chunk, 1);
    if (phase == 1) map(base, chunks, chunk);
    if (phase == 2) set_access(base, chunk, devices);
    if (phase == 3) MUST(mem_unmap(base, chunk));
    if (phase == 4) release(chunks);
    char text[64];
    std::snprintf(text, sizeof text, "%s%s %.2f", phase == 0 ? "" : ", ", names[phase], watch.ms());
    answer += text;
    MUST(cudaStreamSynchronize(stream));
  }
  row("P1", "ms of each call while a kernel of 100 ms runs on another stream (256 MiB)", "%s", answer.c_str());
  MUST(mem_address_free(base, chunk));
  MUST(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  int devices = 1;
  for (int i = 1, reachable = 1; i < gpus() && reachable == 1; i++) {
    MUST(cudaDeviceCanAccessPeer(&reachable, i, 0));
    devices += reachable;
  }
  MUST(cudaSetDevice(0));
  MUST(cudaFree(nullptr));
  const CUmemAllocationProp prop = properties(0);
  size_t least = 0, advised = 0;
  MUST(mem_granularity(&least, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  MUST(mem_granularity(&advised, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  row("P1", "granularity", "at least %zu KiB, %zu KiB recommended", least / 1024, advised / 1024);
  const size_t bytes = std::min<size_t>(16 * kGiga, free_bytes() / 2 / kGiga * kGiga);
  if (bytes == 0) {
    std::fprintf(stderr, "the GPU has less than 2 GiB free\n");
    return 1;
  }
  for (const size_t chunk : {2 * kMega, 64 * kMega, 256 * kMega, 512 * kMega, kGiga}) costs(bytes, chunk, 1, 1);
  for (const int threads : {4, 16}) costs(bytes, 256 * kMega, 1, threads);
  if (devices > 1) costs(bytes, 256 * kMega, devices, 1);
  graphs(kGiga, 256 * kMega, devices);
  waits(256 * kMega, devices);
  return 0;
}
