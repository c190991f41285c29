// P2: memory of one process opened in another, as trainers hand over their weights.
//   ipc              answers all questions (it starts itself again as the second process)
//   ipc open FILE    opens every handle of FILE (64 bytes each, from a process that waits), closes them, prints times
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <vector>

#include "probe.h"

extern char** environ;

namespace {

using namespace refit::probe;

constexpr size_t kBytes = size_t{256} << 20;

__global__ void count_wrong(const uint8_t* in, size_t count, int expected, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    if (in[i] != expected) atomicAdd(wrong, 1ull);
  }
}

unsigned long long wrong_bytes(const void* memory, size_t count, int expected) {
  unsigned long long *counter, wrong = 0;
  MUST(cudaMalloc(&counter, sizeof wrong));
  MUST(cudaMemset(counter, 0, sizeof wrong));
  count_wrong<<<512, 256>>>(static_cast<const uint8_t*>(memory), count, expected, counter);
  MUST(cudaGetLastError());
  MUST(cudaMemcpy(&wrong, counter, sizeof wrong, cudaMemcpyDeviceToHost));
  MUST(cudaFree(counter));
  return wrong;
}

std::vector<cudaIpcMemHandle_t> read_handles(const char* path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto bytes = file ? static_cast<size_t>(file.tellg()) : 0;
  std::vector<cudaIpcMemHandle_t> handles(bytes / sizeof(cudaIpcMemHandle_t));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(handles.data()), handles.size() * sizeof(cudaIpcMemHandle_t));
  if (handles.empty() || !file) {
    std::fprintf(stderr, "%s holds no handles\n", path);
    std::exit(1);
  }
  return handles;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int open_all(const char* path) {
  const auto handles = read_handles(path);
  MUST(cudaSetDevice(0));
  MUST(cudaFree(nullptr));
  std::vector<void*> pointers(handles.size());
  std::vector<double> opened, closed;
  double open_ms[2], close_ms[2];
  for (int turn = 0; turn < 2; turn++) {
    Stopwatch all_opened;
    for (size_t i = 0; i < handles.size(); i++) {
      Stopwatch one;
      MUST(cudaIpcOpenMemHandle(&pointers[i], handles[i], cudaIpcMemLazyEnablePeerAccess));
      opened.push_back(one.us());
    }
    open_ms[turn] = all_opened.ms();
    Stopwatch all_closed;
    for (void* pointer : pointers) {
      Stopwatch one;
      MUST(cudaIpcCloseMemHandle(pointer));
      closed.push_back(one.us());
    }
    close_ms[turn] = all_closed.ms();
  }
  std::printf(
      "{\"handles\": %zu, \"open_ms\": [%.3f, %.3f], \"close_ms\": [%.3f, %.3f], \"open_us\": %.1f, \"close_us\": "
      "%.1f}\n",
      handles.size(), open_ms[0], open_ms[1], close_ms[0], close_ms[1], median(opened), median(closed));
  return 0;
}

int second_process(const char* path) {
  const auto handles = read_handles(path);
  const int devices = gpus();
  MUST(cudaSetDevice(0));
  MUST(cudaFree(nullptr));
  void *pointer = nullptr, *again = nullptr;
  Stopwatch opened;
  MUST(cudaIpcOpenMemHandle(&pointer, handles[0], cudaIpcMemLazyEnablePeerAccess));
  const double open_ms = opened.ms();
  const auto wrong = wrong_bytes(pointer, kBytes, 0x5a);
  const cudaError_t twice = cudaIpcOpenMemHandle(&again, handles[0], cudaIpcMemLazyEnablePeerAccess);
  row("P2", "opened twice in one context", "%s%s", cudaGetErrorName(twice),
      twice == cudaSuccess ? again == pointer ? ", the same address" : ", another address" : "");
  (void)cudaGetLastError();
  if (devices > 1) {
    void* other = nullptr;
    MUST(cudaSetDevice(1));
    const cudaError_t code = cudaIpcOpenMemHandle(&other, handles[0], cudaIpcMemLazyEnablePeerAccess);
    (void)cudaGetLastError();
    const auto seen = code == cudaSuccess ? wrong_bytes(other, kBytes, 0x5a) : 0;
    row("P2", "one handle opened on a second GPU's context of the same process", "%s, %s, %llu bytes wrong",
        cudaGetErrorName(code), other == pointer ? "the same address" : "another address", seen);
    if (code == cudaSuccess) MUST(cudaIpcCloseMemHandle(other));
    MUST(cudaSetDevice(0));
  }
  if (twice == cudaSuccess) MUST(cudaIpcCloseMemHandle(again));
  const auto still = twice == cudaSuccess ? wrong_bytes(pointer, kBytes, 0x5a) : 0;
  Stopwatch closed;
  MUST(cudaIpcCloseMemHandle(pointer));
  row("P2", "opened from another process (256 MiB)",
      "%llu bytes wrong (%llu after one of two closes); open %.3f ms, last close %.3f ms", wrong, still, open_ms,
      closed.ms());
  return wrong + still == 0 ? 0 : 1;
}

int questions() {
  MUST(cudaSetDevice(0));
  void* memory = nullptr;
  MUST(cudaMalloc(&memory, kBytes));
  MUST(cudaMemset(memory, 0x5a, kBytes));
  MUST(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  MUST(cudaIpcGetMemHandle(&handle, memory));
  void* own = nullptr;
  const cudaError_t code = cudaIpcOpenMemHandle(&own, handle, cudaIpcMemLazyEnablePeerAccess);
  (void)cudaGetLastError();
  row("P2", "cudaIpcOpenMemHandle in the process that exported", "%s", cudaGetErrorName(code));
  if (code == cudaSuccess) MUST(cudaIpcCloseMemHandle(own));

  char path[] = "/tmp/refit-probe-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || write(file, &handle, sizeof handle) != sizeof handle) return 1;
  close(file);
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 1;
  char word[] = "second";
  char* arguments[] = {self, word, path, nullptr};
  pid_t child = 0;
  int status = 1;
  std::fflush(stdout);
  if (posix_spawn(&child, self, nullptr, nullptr, arguments, environ) != 0 || waitpid(child, &status, 0) != child)
    return 1;
  unlink(path);
  MUST(cudaFree(memory));
  return status == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "open") == 0) return open_all(argv[2]);
  if (argc == 3 && std::strcmp(argv[1], "second") == 0) return second_process(argv[2]);
  if (argc == 1) return questions();
  std::fprintf(stderr, "usage: ipc [open FILE]\n");
  return 2;
}
