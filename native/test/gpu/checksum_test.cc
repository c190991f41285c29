// Checksums and the noise of scramble on the GPU against the CPU's.   checksum_test [--quick] [--seed N]
#include "core/checksum.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/store.h"
#include "cuda/device/check.h"
#include "cuda/weights/checksum.h"
#include "cuda/weights/scramble.h"
#include "test/check.h"
#include "test/random.h"

using namespace refit;
using namespace refit::cuda;
using test::Random;

namespace {

// docs/checksum.md, step by step.
uint64_t reference(uint64_t index, uint64_t bits) {
  uint64_t z = (index / 8 + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z = (z ^ (z >> 31)) | 1;
  for (uint64_t j = 0; j < index % 8; j++) z *= 0xD1342543DE82EF95u;
  return z * bits;
}

struct Memory {
  std::vector<uint16_t> host;
  uint16_t* gpu = nullptr;
  explicit Memory(Random& random, int64_t elements) : host(static_cast<size_t>(elements)) {
    for (uint16_t& b : host) b = static_cast<uint16_t>(random.next());
    check(cudaMalloc(reinterpret_cast<void**>(&gpu), host.size() * 2), "cudaMalloc");
    check(cudaMemcpy(gpu, host.data(), host.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Memory() { cudaFree(gpu); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

void check_rects(const Memory& memory, const std::vector<SumRect>& rects, const std::string& what) {
  Checksum checksum;
  for (int turn = 0; turn < 2; turn++) {
    const std::vector<uint64_t> got = checksum.run(rects, nullptr);
    CHECK(got.size() == rects.size());
    for (size_t i = 0; i < rects.size(); i++) {
      const SumRect& rect = rects[i];
      const int64_t base = reinterpret_cast<const uint16_t*>(rect.data) - memory.gpu;
      uint64_t expected = 0;
      for (int64_t r = 0; r < rect.rows; r++) {
        for (int64_t c = 0; c < rect.cols; c++) {
          expected += reference(rect.first + static_cast<uint64_t>(r * rect.tensor_cols + c),
                                memory.host[static_cast<size_t>(base + r * rect.pitch + c)]);
        }
      }
      CHECKF(
          got[i] == expected,
          "%s, turn %d, rectangle %zu of %zu: %ld x %ld, pitch %ld, at %ld, first %lu of %ld columns: expected %016lx, "
          "got %016lx",
          what.c_str(), turn, i, rects.size(), long(rect.rows), long(rect.cols), long(rect.pitch), long(base),
          static_cast<unsigned long>(rect.first), long(rect.tensor_cols), static_cast<unsigned long>(expected),
          static_cast<unsigned long>(got[i]));
    }
  }
}

void random_rectangles_sum(uint64_t seed, int count, int64_t most) {
  Random random(seed);
  const Memory memory(random, 4 * most + 1);
  const auto* gpu = reinterpret_cast<const Element*>(memory.gpu);
  std::vector<SumRect> rects;
  for (int i = 0; i < count; i++) {
    SumRect rect{};
    rect.rows = random.chance(10) ? 0 : random.chance(3) ? 1 : 1 + random.below(random.chance(2) ? 8 : 300);
    const int64_t widest = most / std::max<int64_t>(1, rect.rows);
    rect.cols = random.chance(5) ? 1 : random.below(widest);
    if (random.chance(2)) rect.cols = rect.cols / 8 * 8;
    rect.pitch = rect.cols + (random.chance(2) ? 0 : random.chance(2) ? 8 * random.below(5) : random.below(40));
    rect.tensor_cols = rect.cols + (random.chance(2) ? 0 : random.chance(2) ? 8 * random.below(5) : random.below(40));
    if (random.chance(8)) rect.tensor_cols += int64_t{1} << 33;
    rect.first = static_cast<uint64_t>(random.chance(2) ? 8 * random.below(1000) : random.below(1000));
    if (random.chance(4)) rect.first += uint64_t{1} << (20 + random.below(36));
    const int64_t needed = rect.rows * rect.pitch;
    const int64_t at = random.below(4 * most + 1 - needed);
    rect.data = gpu + (random.chance(2) ? at / 8 * 8 : at);
    // One that ends with the allocation.
    if (random.chance(6)) rect.data = gpu + (4 * most + 1 - needed);
    rects.push_back(rect);
  }
  check_rects(memory, rects, "seed " + std::to_string(seed));
}

void more_rectangles_than_one_launch_takes(uint64_t seed) {
  Random random(seed);
  const Memory memory(random, 100000);
  std::vector<SumRect> rects;
  for (int i = 0; i < 30000; i++) {
    rects.push_back({reinterpret_cast<const Element*>(memory.gpu) + random.below(90000), 1 + random.below(3),
                     1 + random.below(20), 24, static_cast<uint64_t>(random.below(1 << 20)), 24});
  }
  check_rects(memory, rects, "30000 rectangles");
}

void parts_of_a_tensor_add_up(uint64_t seed) {
  Random random(seed);
  const int64_t rows = 1777, cols = 4096;
  const Memory memory(random, rows * cols);
  const auto* gpu = reinterpret_cast<const Element*>(memory.gpu);
  Checksum checksum;
  const uint64_t whole = checksum.run({{gpu, 1, rows * cols, rows * cols, 0, rows * cols}}, nullptr)[0];
  CHECKF(whole == checksum_run(memory.host.data(), cuda::kElementType, 0, rows * cols), "%016lx",
         static_cast<unsigned long>(whole));
  for (const int64_t split : {2048, 1, 1001}) {
    const auto parts = checksum.run({{gpu, rows, split, cols, 0, cols},
                                     {gpu + split, rows, cols - split, cols, static_cast<uint64_t>(split), cols}},
                                    nullptr);
    CHECKF(parts[0] + parts[1] == whole, "split at column %ld", long(split));
  }
}

// The same parameters on the CPU and on the GPU.
void noise_is_the_cpus(uint64_t seed) {
  CoreConfig config;
  config.ranks = 2;
  config.params = {{"a", 37, 91}, {"b", 3000, 1}, {"c", 1024, 1024}, {"d", 1, 1}};
  for (Param& param : config.params) param.dtype = kElementType;
  Store store(config);
  Pool pool(1);
  store.scramble(seed, pool);
  for (int rank = 0; rank < config.ranks; rank++) {
    for (int p = 0; p < store.params(); p++) {
      const int64_t count = store.shape(p).rows * store.shape(p).cols;
      std::vector<uint16_t> got(static_cast<size_t>(count) + 64, 0xA5C3);
      uint16_t* gpu = nullptr;
      check(cudaMalloc(reinterpret_cast<void**>(&gpu), got.size() * 2), "cudaMalloc");
      check(cudaMemcpy(gpu, got.data(), got.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
      scramble(reinterpret_cast<Element*>(gpu), count, seed, static_cast<uint64_t>(rank * store.params() + p), nullptr);
      check(cudaMemcpy(got.data(), gpu, got.size() * 2, cudaMemcpyDeviceToHost), "scramble");
      cudaFree(gpu);
      const auto* expected = static_cast<const uint16_t*>(store.param(rank, p));
      for (int64_t i = 0; i < count + 64; i++) {
        const uint16_t want = i < count ? expected[i] : 0xA5C3;
        if (!CHECKF(got[static_cast<size_t>(i)] == want,
                    "rank %d, param %d, element %ld of %ld: expected %04x, got %04x", rank, p, long(i), long(count),
                    want, got[static_cast<size_t>(i)])) {
          break;
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = std::strtoull(argv[++i], nullptr, 10);
  }
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  try {
    for (uint64_t i = 0; i < (quick ? 2 : 20); i++)
      random_rectangles_sum(seed + i, quick ? 15 : 60, quick ? 3000 : 40000);
    noise_is_the_cpus(seed);
    if (!quick) {
      parts_of_a_tensor_add_up(seed);
      more_rectangles_than_one_launch_takes(seed);
    }
  } catch (const std::exception& e) {
    CHECKF(false, "%s", e.what());
  }
  return test::finish("checksum_test");
}
