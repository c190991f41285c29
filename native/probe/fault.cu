// The state of a GPU after a kernel has failed: how soon the host notices, and whether a mark in mapped host memory
// still shows which operation it was. Runs in a process of its own, because it makes the context useless.
#include <thread>

#include "probe.h"

namespace {

using namespace refit::probe;

__global__ void mark(volatile uint32_t* where, uint32_t value) { *where = value; }
__global__ void bad_write(uint32_t* nowhere) { *nowhere = 1; }

}  // namespace

int main() {
  gpus();
  MUST(cudaSetDevice(0));
  cudaStream_t stream, other;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  uint32_t *host = nullptr, *mapped = nullptr;
  MUST(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
  MUST(cudaHostGetDevicePointer(&mapped, host, 0));
  volatile uint32_t* seen = host;
  *seen = 0;
  mark<<<1, 1, 0, stream>>>(mapped, 41);
  MUST(cudaStreamSynchronize(stream));
  mark<<<1, 1, 0, stream>>>(mapped, 42);
  Stopwatch watch;
  bad_write<<<1, 1, 0, stream>>>(reinterpret_cast<uint32_t*>(uint64_t{1} << 46));
  mark<<<1, 1, 0, stream>>>(mapped, 43);
  cudaError_t code = cudaErrorNotReady;
  while ((code = cudaStreamQuery(stream)) == cudaErrorNotReady && watch.ms() < 10000) std::this_thread::yield();
  const double heard = watch.ms();
  row("P6", "an illegal address: the host hears of it, and the last mark in mapped host memory",
      "%s after %.2f ms; mark %u (42 was before the bad kernel, 43 behind it)", cudaGetErrorName(code), heard, *seen);
  void* memory = nullptr;
  const cudaError_t query = cudaStreamQuery(other), allocation = cudaMalloc(&memory, 4096);
  row("P6", "after it: another stream, a new allocation", "%s, %s", cudaGetErrorName(query),
      cudaGetErrorName(allocation));
  return 0;
}
