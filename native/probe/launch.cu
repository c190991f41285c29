// P4, P6: the cost of a launch in a stream and in a graph, from one and two threads; and the cost of a mark that shows
// the host how far a GPU has come: a kernel's write to host memory, or cuStreamWriteValue32.
#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "probe.h"

namespace {

using namespace refit::probe;

constexpr int kKernels = 1000;

// Each kernel adds to the result of the one before: no two may overlap.
__global__ void step(uint32_t* cell) { *cell += 1; }
__global__ void step_and_mark(uint32_t* cell, volatile uint32_t* mark, uint32_t value) {
  *cell += 1;
  *mark = value;
}
__global__ void step_dependent(uint32_t* cell) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
  *cell += 1;
}
__global__ void wait_for(volatile uint32_t* flag, uint32_t value) {
  while (*flag != value) {
  }
}

struct Times {
  double host_us, device_us;  // per kernel
};

// Median of five turns of `enqueue`, which enqueues kKernels operations on the stream.
Times time_of(cudaStream_t stream, const std::function<void()>& enqueue) {
  std::vector<Times> turns;
  cudaEvent_t start, stop;
  MUST(cudaEventCreate(&start));
  MUST(cudaEventCreate(&stop));
  for (int turn = 0; turn < 6; turn++) {
    MUST(cudaStreamSynchronize(stream));
    Stopwatch watch;
    MUST(cudaEventRecord(start, stream));
    enqueue();
    const double host = watch.us();
    MUST(cudaEventRecord(stop, stream));
    MUST(cudaStreamSynchronize(stream));
    if (turn > 0) turns.push_back({host / kKernels, 1000 * ms_between(start, stop) / kKernels});
  }
  MUST(cudaEventDestroy(start));
  MUST(cudaEventDestroy(stop));
  std::sort(turns.begin(), turns.end(), [](const Times& a, const Times& b) { return a.device_us < b.device_us; });
  return turns[2];
}

Times graph_times(cudaStream_t stream, const std::function<void()>& enqueue, double* instantiate_ms) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  MUST(cudaStreamEndCapture(stream, &graph));
  Stopwatch watch;
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  MUST(cudaGraphUpload(exec, stream));
  MUST(cudaStreamSynchronize(stream));
  *instantiate_ms = watch.ms();
  const Times times = time_of(stream, [&] { MUST(cudaGraphLaunch(exec, stream)); });
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
  return times;
}

struct Gpu {
  explicit Gpu(int device) {
    MUST(cudaSetDevice(device));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaMalloc(&cell, 256));
    MUST(cudaMemset(cell, 0, 256));
    MUST(cudaDeviceSynchronize());
  }
  void kernels() const {
    for (int i = 0; i < kKernels; i++) step<<<1, 32, 0, stream>>>(cell);
    MUST(cudaGetLastError());
  }
  void dependent_kernels() const {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = 1;
    config.blockDim = 32;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    for (int i = 0; i < kKernels; i++) MUST(cudaLaunchKernelEx(&config, step_dependent, cell));
  }
  cudaStream_t stream = nullptr;
  uint32_t* cell = nullptr;
};

void launches(const Gpu& gpu) {
  const Times plain = time_of(gpu.stream, [&] { gpu.kernels(); });
  row("P6", "1,000 dependent tiny kernels in a stream, per kernel", "%.2f us on the host, %.2f us on the GPU",
      plain.host_us, plain.device_us);
  double ms = 0;
  const Times graph = graph_times(
      gpu.stream, [&] { gpu.kernels(); }, &ms);
  row("P6", "the same as one graph, per kernel",
      "%.3f us on the host, %.2f us on the GPU (instantiate and upload %.2f ms)", graph.host_us, graph.device_us, ms);
  const Times overlapped = time_of(gpu.stream, [&] { gpu.dependent_kernels(); });
  const Times overlapped_graph = graph_times(
      gpu.stream, [&] { gpu.dependent_kernels(); }, &ms);
  row("P6", "the same with programmatic dependent launch, stream / graph", "%.2f / %.2f us on the GPU",
      overlapped.device_us, overlapped_graph.device_us);
}

void two_threads(int devices) {
  const int second = devices > 1 ? 1 : 0;
  std::atomic<int> ready{0};
  Times times[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; i++) {
    threads.emplace_back([&, i] {
      const Gpu gpu(i == 0 ? 0 : second);
      ready++;
      while (ready < 2) std::this_thread::yield();
      times[i] = time_of(gpu.stream, [&] { gpu.kernels(); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  row("P6", devices > 1 ? "two threads, a GPU each, per kernel" : "two threads, one GPU, per kernel",
      "%.2f and %.2f us on the host, %.2f and %.2f us on the GPU", times[0].host_us, times[1].host_us,
      times[0].device_us, times[1].device_us);
}

void marks(const Gpu& gpu) {
  uint32_t *host = nullptr, *mapped = nullptr, *local = nullptr;
  MUST(cudaHostAlloc(&host, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
  MUST(cudaHostGetDevicePointer(&mapped, host, 0));
  MUST(cudaMalloc(&local, 4096));
  *host = 0;
  const auto marking = [&](uint32_t* mark) {
    return time_of(gpu.stream, [&] {
      for (int i = 0; i < kKernels; i++) step_and_mark<<<1, 32, 0, gpu.stream>>>(gpu.cell, mark, i);
      MUST(cudaGetLastError());
    });
  };
  const Times none = time_of(gpu.stream, [&] { gpu.kernels(); });
  const Times own = marking(local), far = marking(mapped);
  row("P6", "kernel that writes a mark: none / to the GPU / to mapped host memory",
      "%.2f / %.2f / %.2f us on the GPU per kernel", none.device_us, own.device_us, far.device_us);

  const auto write_value = DRIVER(cuStreamWriteValue32);
  const auto writing = [&](uint32_t* mark) {
    return time_of(gpu.stream, [&] {
      for (int i = 0; i < kKernels; i++) {
        step<<<1, 32, 0, gpu.stream>>>(gpu.cell);
        MUST(write_value(gpu.stream, reinterpret_cast<CUdeviceptr>(mark), i, CU_STREAM_WRITE_VALUE_DEFAULT));
      }
    });
  };
  const Times value_own = writing(local), value_far = writing(mapped);
  row("P6", "kernel, then cuStreamWriteValue32: to the GPU / to mapped host memory",
      "%.2f / %.2f us on the host, %.2f / %.2f us on the GPU per pair", value_own.host_us, value_far.host_us,
      value_own.device_us, value_far.device_us);
  double ms = 0;
  const Times in_graph = graph_times(
      gpu.stream,
      [&] {
        for (int i = 0; i < kKernels; i++) step_and_mark<<<1, 32, 0, gpu.stream>>>(gpu.cell, mapped, i);
      },
      &ms);
  row("P6", "kernel that writes a mark to mapped host memory, in a graph", "%.2f us on the GPU per kernel",
      in_graph.device_us);

  // The host sees a mark; a GPU sees the host's reply.
  volatile uint32_t* seen = host;
  volatile uint32_t* answer = host + 512;
  std::vector<double> trips;
  for (uint32_t i = 1; i <= 200; i++) {
    *seen = 0;
    *answer = 0;
    step_and_mark<<<1, 1, 0, gpu.stream>>>(gpu.cell, mapped, i);
    wait_for<<<1, 1, 0, gpu.stream>>>(mapped + 512, i);
    step_and_mark<<<1, 1, 0, gpu.stream>>>(gpu.cell, mapped, i + 1000);
    MUST(cudaGetLastError());
    while (*seen != i) {
    }
    Stopwatch watch;
    *answer = i;
    while (*seen != i + 1000) {
    }
    trips.push_back(watch.us());
    MUST(cudaStreamSynchronize(gpu.stream));
  }
  std::sort(trips.begin(), trips.end());
  row("P6", "host writes a flag, a waiting kernel ends, the next one's mark is seen by the host",
      "%.1f us (median of 200)", trips[100]);

  std::vector<double> syncs;
  for (int i = 0; i < 200; i++) {
    Stopwatch watch;
    step<<<1, 32, 0, gpu.stream>>>(gpu.cell);
    MUST(cudaStreamSynchronize(gpu.stream));
    syncs.push_back(watch.us());
  }
  std::sort(syncs.begin(), syncs.end());
  row("P6", "launch of one kernel and cudaStreamSynchronize", "%.1f us (median of 200)", syncs[100]);
  MUST(cudaFree(local));
  MUST(cudaFreeHost(host));
}

void peers(int devices) {
  std::string table;
  for (int a = 0; a < devices; a++) {
    for (int b = 0; b < devices; b++) {
      int can = 0;
      if (a != b) MUST(cudaDeviceCanAccessPeer(&can, a, b));
      if (a != b && can == 0) table += (table.empty() ? "not " : ", ") + std::to_string(a) + " -> " + std::to_string(b);
    }
  }
  row("P4", "peer access", "%s", devices == 1 ? "one GPU" : table.empty() ? "between all GPUs" : table.c_str());
}

}  // namespace

int main() {
  const int devices = gpus();
  peers(devices);
  {
    const Gpu gpu(0);
    launches(gpu);
    marks(gpu);
  }
  two_threads(devices);
  return 0;
}
