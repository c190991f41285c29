// Shared by the probes: checks that end the program, clocks, the driver's functions, and rows of the table of answers.
// A probe asks one question about a GPU and its driver; it tests no code of refit.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace refit::probe {

inline void must(cudaError_t code, const char* what, int line) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s (%s)\n", line, what, cudaGetErrorName(code), cudaGetErrorString(code));
  std::exit(1);
}
inline void must(CUresult code, const char* what, int line) {
  if (code == CUDA_SUCCESS) return;
  std::fprintf(stderr, "line %d: %s: driver error %d\n", line, what, static_cast<int>(code));
  std::exit(1);
}
#define MUST(call) ::refit::probe::must((call), #call, __LINE__)

// A driver function without linking libcuda: the version that CUDA 13 declares.
template <typename F>
F driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  MUST(cudaGetDriverEntryPointByVersion(name, &function, CUDART_VERSION, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    std::fprintf(stderr, "the driver has no %s\n", name);
    std::exit(1);
  }
  return reinterpret_cast<F>(function);
}
#define DRIVER(name) ::refit::probe::driver_function<decltype(&name)>(#name)

class Stopwatch {
 public:
  double ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  double us() const { return ms() * 1000; }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// One line of the table that run.py collects.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
inline void
row(const char* probe, const char* question, const char* format, ...) {
  char text[600];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::printf("| %s | %s | %s |\n", probe, question, text);
  std::fflush(stdout);
}

inline int gpus() {
  int count = 0;
  MUST(cudaGetDeviceCount(&count));
  if (count == 0) {
    std::fprintf(stderr, "no GPU\n");
    std::exit(1);
  }
  return count;
}

inline double ms_between(cudaEvent_t start, cudaEvent_t stop) {
  float ms = 0;
  MUST(cudaEventElapsedTime(&ms, start, stop));
  return ms;
}

}  // namespace refit::probe
