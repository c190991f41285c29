// The batched scatter, compared with the GPU's own copies of the same bytes.
//   scatter_bench [--turns N] [--only 8b|30b|tp2|odd|host]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench_gpu/bench_kernels.h"
#include "bench_gpu/checkpoint.h"
#include "bench_gpu/timing.h"
#include "core/checksum.h"
#include "cuda/scatter/scatter.h"
#include "cuda/scatter/scatter_runs.h"
#include "cuda/weights/checksum.h"
#include "cuda/weights/write_batches.h"

using namespace refit;
using namespace refit::bench;
using namespace refit::cuda;

namespace {

void fill(int device, uint8_t* data, size_t bytes, uint64_t seed) {
  check(cudaSetDevice(device), "cudaSetDevice");
  fill_words(reinterpret_cast<uint64_t*>(data), bytes / 8, seed);
  check(cudaDeviceSynchronize(), "fill");
  check(cudaSetDevice(0), "cudaSetDevice");
}

// Rank 0's parameters one after another, each at a multiple of 256 bytes.
struct Target {
  std::vector<uint64_t> at;
  uint64_t bytes = 0;
  explicit Target(const Checkpoint& checkpoint) {
    for (const Param& p : checkpoint.params) {
      at.push_back(bytes);
      bytes += (static_cast<uint64_t>(p.rows * p.cols) * 2 + 255) / 256 * 256;
    }
  }
};

struct Scattered {
  std::vector<Copy2d> copies;
  uint64_t bytes = 0;
};

Scattered copies_of(const Checkpoint& checkpoint, const Target& target, const uint8_t* source, uint8_t* to) {
  Scattered out;
  for (const Rect& rect : checkpoint.job.rects) {
    if (rect.rank != 0) continue;
    auto* param = reinterpret_cast<Element*>(to + target.at[static_cast<size_t>(rect.param)]);
    out.copies.push_back(rect_copy(checkpoint.job.tensors[static_cast<size_t>(rect.tensor)], rect,
                                   checkpoint.params[static_cast<size_t>(rect.param)], source, param));
    out.bytes += static_cast<uint64_t>(rect.rows * rect.cols) * 2;
  }
  return out;
}

// Every copied element is in its place: both sides have the same checksums.
bool arrived(const std::vector<Copy2d>& copies) {
  std::vector<SumRect> from, to;
  for (const Copy2d& c : copies) {
    from.push_back({static_cast<const Element*>(c.src), c.rows, c.cols, c.src_row_bytes / 2, 0, c.cols});
    to.push_back({c.dst, c.rows, c.cols, c.dst_cols, 0, c.cols});
  }
  Checksum checksum;
  return checksum.run(from, nullptr) == checksum.run(to, nullptr);
}

void bench_list(const std::string& title, const Scattered& list, uint8_t* target, uint64_t target_bytes,
                const std::function<void(cudaStream_t)>& reference, const char* reference_name, int turns) {
  Scatter scatter, kernel(Scatter::kTileBytes, true, UINT64_MAX), plain(Scatter::kTileBytes, false, UINT64_MAX);
  check(cudaMemset(target, 0xA5, target_bytes), "cudaMemset");
  scatter.run(list.copies, nullptr);
  check(cudaDeviceSynchronize(), "scatter");
  if (!arrived(list.copies)) std::printf("WRONG: %s\n", title.c_str());
  std::vector<Contestant> contestants{
      {reference_name, reference, {}},
      {"scatter", [&scatter, &list](cudaStream_t s) { scatter.run(list.copies, s); }, {}},
      {"scatter, its kernel alone", [&kernel, &list](cudaStream_t s) { kernel.run(list.copies, s); }, {}},
      {"scatter, its kernel without bulk copies", [&plain, &list](cudaStream_t s) { plain.run(list.copies, s); }, {}}};
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  take_turns(contestants, turns, stream);
  print_table(title + ", " + std::to_string(list.copies.size()) + " rectangles", contestants,
              static_cast<double>(list.bytes));
  // The host's work before the GPU begins.
  const auto begin = std::chrono::steady_clock::now();
  scatter.run(list.copies, stream);
  const std::chrono::duration<double, std::milli> host = std::chrono::steady_clock::now() - begin;
  check(cudaStreamSynchronize(stream), "scatter");
  std::printf("  (host time of one list: %.3f ms)\n", host.count());
  cudaStreamDestroy(stream);
}

void one_gpu(Shape shape, int ranks, int turns) {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const int64_t layers = shape.layers;
  while (Checkpoint(shape, ranks).bytes + Target(Checkpoint(shape, ranks)).bytes + (size_t{1} << 30) > free)
    shape.layers--;
  if (shape.layers < layers) {
    std::printf("\n%s: %ld of its %ld layers, more do not fit twice into this GPU\n", shape.name,
                static_cast<long>(shape.layers), static_cast<long>(layers));
  }
  const Checkpoint checkpoint(shape, ranks);
  const Target target(checkpoint);
  const GpuMemory source(0, checkpoint.bytes), to(0, target.bytes);
  fill(0, source.data(), checkpoint.bytes, 1);
  const Scattered list = copies_of(checkpoint, target, source.data(), to.data());
  const std::string what = std::string(shape.name) + (ranks > 1 ? ", rank 0 of " + std::to_string(ranks) : "") +
                           ", one GPU, " + std::to_string(checkpoint.job.tensors.size()) + " tensors";
  bench_list(
      what, list, to.data(), target.bytes,
      [&](cudaStream_t s) {
        check(cudaMemcpyAsync(to.data(), source.data(), list.bytes, cudaMemcpyDeviceToDevice, s), "cudaMemcpyAsync");
      },
      "cudaMemcpyAsync, device to device", turns);
}

void from_peer(int turns) {
  int gpus = 0, reach = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (gpus > 1) check(cudaDeviceCanAccessPeer(&reach, 0, 1), "cudaDeviceCanAccessPeer");
  if (reach == 0) {
    std::printf("\nno second GPU in reach: slices over NVLink were not measured\n");
    return;
  }
  check(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  const Checkpoint checkpoint(kQwen3_8B, 2);
  const Target target(checkpoint);
  const GpuMemory source(1, checkpoint.bytes), to(0, target.bytes);
  fill(1, source.data(), checkpoint.bytes, 2);
  const Scattered both = copies_of(checkpoint, target, source.data(), to.data());
  Scattered rows, cols;
  for (const Copy2d& c : both.copies) {
    Scattered& part = run_bytes(c) > 0 ? rows : cols;
    part.copies.push_back(c);
    part.bytes += static_cast<uint64_t>(c.rows * c.cols) * 2;
  }
  const auto bench = [&](const char* title, const Scattered& list) {
    bench_list(
        title, list, to.data(), target.bytes,
        [&](cudaStream_t s) {
          check(cudaMemcpyPeerAsync(to.data(), 0, source.data(), 1, list.bytes, s), "cudaMemcpyPeerAsync");
        },
        "cudaMemcpyPeerAsync", turns);
  };
  bench("Qwen3-8B, rank 0 of 2 from a peer, row slices", rows);
  bench("Qwen3-8B, rank 0 of 2 from a peer, column slices", cols);
  bench("Qwen3-8B, rank 0 of 2 from a peer, all of it", both);
}

// The slower paths: 256 matrices of [4096, 4096], compared with a copy that moves as many bytes, read and written.
void odd_sources(int turns) {
  constexpr int64_t kSide = 4096, kCount = 64;
  constexpr uint64_t kElements = kSide * kSide;
  const GpuMemory source(0, kCount * kElements * 4 + 4096), to(0, kCount * kElements * 4);
  fill(0, source.data(), kCount * kElements * 4, 3);
  struct Odd {
    const char* name;
    DType dtype;
    uint64_t offset;
    bool transposed;
    int64_t step, dst_cols;
  };
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const Odd& odd :
       {Odd{"bf16 from 2 bytes beside alignment", DType::kBFloat16, 2, false, 1, kSide},
        Odd{"bf16 from an odd address", DType::kBFloat16, 1, false, 1, kSide},
        Odd{"bf16 into rows of odd length", DType::kBFloat16, 0, false, 1, kSide + 1},
        Odd{"fp16", DType::kFloat16, 0, false, 1, kSide}, Odd{"fp32", DType::kFloat32, 0, false, 1, kSide},
        Odd{"fp32 from 4 bytes beside alignment", DType::kFloat32, 4, false, 1, kSide},
        Odd{"bf16, every second column", DType::kBFloat16, 0, false, 2, kSide},
        Odd{"bf16, transposed", DType::kBFloat16, 0, true, 1, kSide},
        Odd{"fp32, transposed", DType::kFloat32, 0, true, 1, kSide}}) {
    const auto element = static_cast<int64_t>(size_of(odd.dtype));
    std::vector<Copy2d> copies;
    for (int64_t i = 0; i < kCount; i++) {
      Copy2d copy{};
      copy.src =
          source.data() + static_cast<uint64_t>(i) * kElements * static_cast<uint64_t>(element * odd.step) + odd.offset;
      copy.dst = reinterpret_cast<Element*>(to.data()) + i * kSide * odd.dst_cols;
      copy.rows = copy.cols = kSide;
      copy.src_row_bytes = odd.transposed ? element : kSide * element * odd.step;
      copy.src_col_bytes = odd.transposed ? kSide * element : element * odd.step;
      copy.dst_cols = odd.dst_cols;
      copy.dtype = odd.dtype;
      copies.push_back(copy);
    }
    // The memory reads all bytes of a strided source.
    const auto moved = static_cast<uint64_t>(kCount) * kElements * static_cast<uint64_t>(element * odd.step + 2);
    Scatter scatter;
    std::vector<Contestant> contestants{
        {"cudaMemcpyAsync that moves as many bytes",
         [&](cudaStream_t s) {
           check(cudaMemcpyAsync(to.data(), source.data(), moved / 2, cudaMemcpyDeviceToDevice, s), "cudaMemcpyAsync");
         },
         {}},
        {odd.name, [&](cudaStream_t s) { scatter.run(copies, s); }, {}}};
    take_turns(contestants, turns, stream);
    print_table(std::string(odd.name) + ", bytes read and written", contestants, static_cast<double>(moved));
  }
  cudaStreamDestroy(stream);
}

void from_host(int turns) {
  constexpr uint64_t kBytes = uint64_t{1} << 30;
  const GpuMemory to(0, kBytes);
  uint8_t* host = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&host), kBytes, cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(host, 1, kBytes);
  Scatter scatter;
  std::vector<std::vector<Copy2d>> lists;
  const auto add = [&](int64_t cols, int64_t pitch) {
    Copy2d copy{};
    copy.src = host;
    copy.dst = reinterpret_cast<Element*>(to.data());
    copy.rows = static_cast<int64_t>(kBytes) / 2 / pitch;
    copy.cols = copy.dst_cols = cols;
    copy.src_row_bytes = pitch * 2;
    copy.src_col_bytes = 2;
    copy.dtype = DType::kBFloat16;
    lists.push_back({copy});
  };
  add(4096, 4096);
  add(2048, 4096);
  add(384, 768);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (size_t i = 0; i < lists.size(); i++) {
    const Copy2d& c = lists[i][0];
    const uint64_t bytes = static_cast<uint64_t>(c.rows * c.cols) * 2;
    std::vector<Contestant> contestants{
        {"cudaMemcpyAsync of as many bytes",
         [&](cudaStream_t s) { check(cudaMemcpyAsync(to.data(), host, bytes, cudaMemcpyHostToDevice, s), "copy"); },
         {}},
        {"cudaMemcpy2DAsync",
         [&](cudaStream_t s) {
           check(cudaMemcpy2DAsync(to.data(), static_cast<size_t>(c.cols) * 2, host,
                                   static_cast<size_t>(c.src_row_bytes), static_cast<size_t>(c.cols) * 2,
                                   static_cast<size_t>(c.rows), cudaMemcpyHostToDevice, s),
                 "copy");
         },
         {}},
        {"scatter kernel", [&](cudaStream_t s) { scatter.run(lists[i], s, true); }, {}}};
    take_turns(contestants, turns, stream);
    print_table("pinned host memory, rows of " + std::to_string(c.cols * 2) + " bytes, " +
                    std::to_string(c.src_row_bytes) + " apart",
                contestants, static_cast<double>(bytes));
  }
  cudaStreamDestroy(stream);
  cudaFreeHost(host);
}

}  // namespace

int main(int argc, char** argv) {
  int turns = 11;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--turns") == 0) turns = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
  }
  try {
    print_gpu(0);
    if (only.empty() || only == "8b") {
      one_gpu(kQwen3_8B, 1, turns);
      one_gpu(kQwen3_8B, 2, turns);
    }
    if (only.empty() || only == "30b") {
      one_gpu(kQwen3_30B_A3B, 1, turns);
      one_gpu(kQwen3_30B_A3B, 2, turns);
    }
    if (only.empty() || only == "tp2") from_peer(turns);
    if (only.empty() || only == "odd") odd_sources(turns);
    if (only.empty() || only == "host") from_host(turns);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "scatter_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
