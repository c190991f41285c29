// Times of GPUs and hosts for the benchmarks: alternating turns, medians.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "cuda/device/check.h"

namespace refit::bench {

// One of the compared variants: `run` enqueues on the stream; holds the milliseconds of each turn.
struct Contestant {
  std::string name;
  std::function<void(cudaStream_t)> run;
  std::vector<double> ms;

  double median() const {
    std::vector<double> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

// Times by CUDA events around everything that run() enqueues, including host work before it. One turn of each is not
// counted.
inline void take_turns(std::vector<Contestant>& all, int turns, cudaStream_t stream) {
  cudaEvent_t begin, end;
  cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  for (int turn = -1; turn < turns; turn++) {
    for (Contestant& one : all) {
      cuda::check(cudaEventRecord(begin, stream), "cudaEventRecord");
      one.run(stream);
      cuda::check(cudaEventRecord(end, stream), "cudaEventRecord");
      cuda::check(cudaEventSynchronize(end), one.name.c_str());
      float ms = 0;
      cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      if (turn >= 0) one.ms.push_back(static_cast<double>(ms));
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// Times by the clock, for work that ends on the host.
inline void take_turns_by_clock(std::vector<Contestant>& all, int turns) {
  for (int turn = -1; turn < turns; turn++) {
    for (Contestant& one : all) {
      const auto begin = std::chrono::steady_clock::now();
      one.run(nullptr);
      const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
      if (turn >= 0) one.ms.push_back(ms.count());
    }
  }
}

// The first one is the reference. `bytes`: payload.
inline void print_table(const std::string& title, const std::vector<Contestant>& all, double bytes) {
  std::printf("\n%s (%.2f GB)\n", title.c_str(), bytes / 1e9);
  for (const Contestant& one : all) {
    const auto [least, most] = std::minmax_element(one.ms.begin(), one.ms.end());
    std::printf("  %-64s %9.3f ms (%8.3f to %8.3f)  %8.1f GB/s  %6.1f %%\n", one.name.c_str(), one.median(), *least,
                *most, bytes / one.median() / 1e6, 100 * all[0].median() / one.median());
  }
  std::fflush(stdout);
}

inline void print_gpu(int device) {
  cudaDeviceProp prop;
  int driver = 0, runtime = 0;
  cuda::check(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
  cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  std::printf("GPU %d: %s, sm_%d%d, %d SMs, %.1f GB; CUDA driver %d.%d, runtime %d.%d\n", device, prop.name, prop.major,
              prop.minor, prop.multiProcessorCount, static_cast<double>(prop.totalGlobalMem) / 1e9, driver / 1000,
              driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}

// Memory of a GPU.
class GpuMemory {
 public:
  GpuMemory(int device, size_t bytes) : device_(device) {
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    cuda::check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes), "cudaMalloc");
    cuda::check(cudaSetDevice(0), "cudaSetDevice");
  }
  ~GpuMemory() {
    cudaSetDevice(device_);
    cudaFree(data_);
    cudaSetDevice(0);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  uint8_t* data() const { return data_; }

 private:
  const int device_;
  uint8_t* data_ = nullptr;
};

}  // namespace refit::bench
