// The limits of a GPU that results are compared with: read, copy, pinned host memory to GPU and back, peer copy.
//   bandwidth          rows of the table of answers
//   bandwidth --json   one JSON object: {"card", "read_gbs", "copy_gbs", "h2d_gbs", "d2h_gbs", "peer_gbs"?}
// A copy counts its payload: the same number of bytes is read and written.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "probe.h"

namespace {

using namespace refit::probe;

constexpr size_t kBytes = size_t{8} << 30;
constexpr size_t kHostBytes = size_t{1} << 30;

// Reads every 16 bytes once; the sum keeps the compiler from removing the reads.
__global__ void __launch_bounds__(512) read_all(const uint4* in, size_t count, uint32_t* out) {
  uint32_t sum = 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(in + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < count; i += stride) {
    const uint4 v = __ldcs(in + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345677u) *out = sum;
}

// Numbers that do not compress and are not zero.
__global__ void noise(uint4* out, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 27;
    out[i] = make_uint4(uint32_t(z), uint32_t(z >> 32), uint32_t(z * 3), uint32_t((z * 5) >> 32));
  }
}

// GB/s of `run`, which moves `bytes`: the median of seven turns after a warm-up.
double gbs(size_t bytes, cudaStream_t stream, const std::function<void()>& run) {
  cudaEvent_t start, stop;
  MUST(cudaEventCreate(&start));
  MUST(cudaEventCreate(&stop));
  std::vector<double> turns;
  for (int turn = 0; turn < 8; turn++) {
    MUST(cudaEventRecord(start, stream));
    run();
    MUST(cudaEventRecord(stop, stream));
    MUST(cudaStreamSynchronize(stream));
    if (turn > 0) turns.push_back(bytes / ms_between(start, stop) / 1e6);
  }
  std::sort(turns.begin(), turns.end());
  MUST(cudaEventDestroy(start));
  MUST(cudaEventDestroy(stop));
  return turns[turns.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  const int devices = gpus();
  MUST(cudaSetDevice(0));
  cudaDeviceProp properties;
  MUST(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  size_t free = 0, total = 0;
  MUST(cudaMemGetInfo(&free, &total));
  const size_t bytes = std::min(kBytes, free / 4 / 4096 * 4096);
  uint4 *a = nullptr, *b = nullptr;
  uint32_t* out = nullptr;
  void* host = nullptr;
  MUST(cudaMalloc(&a, bytes));
  MUST(cudaMalloc(&b, bytes));
  MUST(cudaMalloc(&out, 256));
  MUST(cudaHostAlloc(&host, kHostBytes, cudaHostAllocDefault));
  noise<<<4096, 256, 0, stream>>>(a, bytes / 16);
  MUST(cudaGetLastError());
  const int blocks = properties.multiProcessorCount * 4;
  const double read = gbs(bytes, stream, [&] {
    read_all<<<blocks, 512, 0, stream>>>(a, bytes / 16, out);
    MUST(cudaGetLastError());
  });
  const double copy = gbs(bytes, stream, [&] { MUST(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice, stream)); });
  const size_t piece = std::min(kHostBytes, bytes);
  const double d2h = gbs(piece, stream, [&] { MUST(cudaMemcpyAsync(host, a, piece, cudaMemcpyDeviceToHost, stream)); });
  const double h2d = gbs(piece, stream, [&] { MUST(cudaMemcpyAsync(b, host, piece, cudaMemcpyHostToDevice, stream)); });
  double peer = 0;
  int reachable = 0;
  if (devices > 1) MUST(cudaDeviceCanAccessPeer(&reachable, 0, 1));
  if (reachable == 1) {
    void* far = nullptr;
    MUST(cudaDeviceEnablePeerAccess(1, 0));
    MUST(cudaSetDevice(1));
    MUST(cudaDeviceEnablePeerAccess(0, 0));
    MUST(cudaMalloc(&far, bytes));
    MUST(cudaMemset(far, 0x5a, bytes));
    MUST(cudaDeviceSynchronize());
    MUST(cudaSetDevice(0));
    peer = gbs(bytes, stream, [&] { MUST(cudaMemcpyAsync(b, far, bytes, cudaMemcpyDeviceToDevice, stream)); });
  }
  if (json) {
    std::printf("{\"card\": \"%s\", \"read_gbs\": %.1f, \"copy_gbs\": %.1f, \"h2d_gbs\": %.2f, \"d2h_gbs\": %.2f",
                properties.name, read, copy, h2d, d2h);
    if (peer > 0) std::printf(", \"peer_gbs\": %.1f", peer);
    std::printf("}\n");
    return 0;
  }
  row("P6", "reading the GPU's memory with a kernel", "%.0f GB/s (%.1f GB)", read, bytes / 1e9);
  row("P6", "copy on the GPU (payload)", "%.0f GB/s", copy);
  row("P6", "pinned host memory to GPU, and back", "%.1f and %.1f GB/s", h2d, d2h);
  if (peer > 0) row("P4", "copy from a peer", "%.0f GB/s", peer);
  return 0;
}
