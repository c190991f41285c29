// The checksum of 16 GB of parameters, compared with kernels that only read them.   checksum_bench [--turns N] [--gb N]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bench_gpu/bench_kernels.h"
#include "bench_gpu/checkpoint.h"
#include "bench_gpu/timing.h"
#include "core/checksum.h"
#include "cuda/weights/checksum.h"

using namespace refit;
using namespace refit::bench;
using namespace refit::cuda;

int main(int argc, char** argv) {
  int turns = 11;
  double gb = 16;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--turns") == 0) turns = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--gb") == 0) gb = std::atof(argv[i + 1]);
  }
  try {
    print_gpu(0);
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    const auto bytes = static_cast<uint64_t>(gb * 1e9) / 8192 * 8192;
    const GpuMemory memory(0, bytes + 4096), out(0, 4);
    fill_words(reinterpret_cast<uint64_t*>(memory.data()), bytes / 8, 0);
    const auto* data = reinterpret_cast<const uint4*>(memory.data());
    const size_t count = bytes / 16;
    auto* sink = reinterpret_cast<uint32_t*>(out.data());
    const auto* elements = reinterpret_cast<const Element*>(memory.data());
    const auto n = static_cast<int64_t>(bytes / 2);
    Checksum checksum;
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaDeviceSynchronize(), "fill");
    // The parameters of a checkpoint as far as they fit, and column slices of it.
    std::vector<SumRect> list, slices, shifted;
    int64_t at = 0;
    for (const Tensor& t : Checkpoint(kQwen3_8B, 1).job.tensors) {
      if (at + t.rows * t.cols > n) break;
      list.push_back({elements + at, t.rows, t.cols, t.cols, 0, t.cols});
      at += t.rows * t.cols;
    }
    for (int64_t i = 0; (i + 1) * 4096 * 4096 <= n; i++) {
      slices.push_back({elements + i * 4096 * 4096, 4096, 4096, 4096, 4096, 8192});
      shifted.push_back({elements + i * 4096 * 4096 + 3, 4096, 4096, 4096, 5, 8192});
    }
    std::vector<Contestant> all;
    const auto kernel = [&](const char* name, auto launch) { all.push_back({name, launch, {}}); };
    kernel("reads alone, 4 x 16 bytes, 4 blocks of 512", [&](cudaStream_t s) {
      read_512_by_4(4 * sms, data, count, sink, s);
      check_launch("read");
    });
    kernel("reads alone, 8 x 16 bytes, 8 blocks of 256", [&](cudaStream_t s) {
      read_256_by_8(8 * sms, data, count, sink, s);
      check_launch("read");
    });
    kernel("reads alone, 4 x 16 bytes, a block for each part", [&](cudaStream_t s) {
      read_512_by_4(static_cast<unsigned>((count + 2047) / 2048), data, count, sink, s);
      check_launch("read");
    });
    kernel("checksum of one tensor", [&](cudaStream_t s) { checksum.run({{elements, 1, n, n, 0, n}}, s); });
    kernel("checksum of Qwen3-8B's tensors", [&](cudaStream_t s) { checksum.run(list, s); });
    kernel("checksum of column slices", [&](cudaStream_t s) { checksum.run(slices, s); });
    kernel("checksum where groups lie beside alignment", [&](cudaStream_t s) { checksum.run(shifted, s); });
    take_turns(all, turns, stream);
    // The fastest reader is the reference.
    for (size_t i = 1; i < 3; i++) {
      if (all[i].median() < all[0].median()) std::swap(all[0], all[i]);
    }
    print_table("checksum beside reads", all, static_cast<double>(bytes));
    const std::vector<uint64_t> got = checksum.run({{elements, 1, 1 << 22, 1 << 22, 0, 1 << 22}}, stream);
    std::vector<uint16_t> host(1 << 22);
    check(cudaMemcpy(host.data(), elements, host.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const uint64_t want = checksum_run(host.data(), DType::kBFloat16, 0, 1 << 22);
    std::printf("  first 4 Mi elements: %016lx, the CPU says %016lx%s\n", static_cast<unsigned long>(got[0]),
                static_cast<unsigned long>(want), got[0] == want ? "" : "  WRONG");
    return got[0] == want ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "checksum_bench: %s\n", e.what());
    return 1;
  }
}
