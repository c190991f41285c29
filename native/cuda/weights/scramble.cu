#include <algorithm>

#include "core/checksum.h"
#include "cuda/device/check.h"
#include "cuda/weights/scramble.h"

namespace refit::cuda {
namespace {

constexpr int kScrambleThreads = 256;

// Values are finite and within [-1, 1); the GPU rounds to Element as core/dtype.h does.
__global__ void __launch_bounds__(kScrambleThreads) scramble_kernel(Element* out, int64_t count, uint64_t key) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScrambleThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kScrambleThreads + threadIdx.x; i < count; i += step) {
    out[i] = to_element(scramble_noise(key, i));
  }
}

}  // namespace

void scramble(Element* out, int64_t count, uint64_t seed, uint64_t address, cudaStream_t stream) {
  if (count <= 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + kScrambleThreads - 1) / kScrambleThreads, 4096));
  scramble_kernel<<<blocks, kScrambleThreads, 0, stream>>>(out, count, scramble_key(seed, address));
  check_launch("scramble");
}

}  // namespace refit::cuda
