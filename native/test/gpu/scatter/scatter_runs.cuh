// Runs that are copied as one: joined on the host, and copied by the GPU.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/scatter/scatter.h"
#include "cuda/scatter/scatter_runs.h"
#include "test/check.h"
#include "test/gpu/scatter/scatter_world.cuh"

namespace {

using namespace refit;
using namespace refit::cuda;

// Rows of a pool, most of them adjacent on both sides; others after a gap, of another type, or with gaps between their
// rows.
struct PoolList {
  std::vector<Copy2d> copies;  // addresses from 0 on; those of targets in elements
  int64_t source = 0, target = 0;
  explicit PoolList(uint64_t seed) {
    Random random(seed);
    int memory = 0;
    for (int64_t i = 0, count = 1 + random.below(60); i < count; i++) {
      Copy2d copy{};
      copy.dtype = random.chance(12) ? of_element(DType::kFloat16, DType::kBFloat16) : kElementType;
      copy.rows = random.below(6);
      copy.cols = 1 + random.below(random.chance(4) ? 3000 : 50);
      if (!random.chance(5)) copy.cols = (copy.cols + 7) / 8 * 8;
      if (random.chance(8)) memory++;
      copy.memory = memory;
      if (random.chance(8)) source += 2 * random.below(9);
      if (random.chance(8)) target += random.below(9);
      const int64_t gap = random.chance(10) ? 1 + random.below(5) : 0;
      const int64_t gap_to = random.chance(10) ? 1 + random.below(5) : 0;
      copy.src_col_bytes = 2;
      copy.src_row_bytes = (copy.cols + gap) * 2;
      copy.dst_cols = copy.cols + gap_to;
      copy.src = reinterpret_cast<void*>(source);
      copy.dst = reinterpret_cast<Element*>(target * 2);
      source += copy.rows * copy.src_row_bytes;
      target += copy.rows * copy.dst_cols;
      copies.push_back(copy);
    }
  }
  std::vector<Copy2d> at(const uint8_t* from, uint8_t* to) const {
    std::vector<Copy2d> out = copies;
    for (Copy2d& copy : out) {
      copy.src = from + reinterpret_cast<uintptr_t>(copy.src);
      copy.dst = reinterpret_cast<Element*>(to + reinterpret_cast<uintptr_t>(copy.dst));
    }
    return out;
  }
};

void copy_plainly(const Copy2d& copy) {
  for (int64_t r = 0; r < copy.rows; r++) {
    for (int64_t k = 0; k < copy.cols; k++) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const uint8_t*>(copy.src) + r * copy.src_row_bytes + k * copy.src_col_bytes, 2);
      bits = static_cast<uint16_t>(convert_bits(copy.dtype, kElementType, bits));
      std::memcpy(copy.dst + r * copy.dst_cols + k, &bits, 2);
    }
  }
}

std::vector<uint8_t> random_bytes(uint64_t seed, size_t size) {
  Random random(seed);
  std::vector<uint8_t> out(size);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random.next());
  return out;
}

void runs_and_the_rest_are_the_copies(uint64_t seed) {
  const PoolList list(seed);
  const auto source = random_bytes(seed, static_cast<size_t>(list.source) + 1);
  std::vector<uint8_t> expected(static_cast<size_t>(list.target) * 2, 0xA5), got = expected;
  for (const Copy2d& copy : list.at(source.data(), expected.data())) copy_plainly(copy);
  const uint64_t least = uint64_t{1} << (seed % 15);
  const auto copies = list.at(source.data(), got.data());
  const SplitCopies split = split_runs(copies, least);
  uint64_t bytes = 0, sum = 0;
  const auto is_of_one_memory = [&](const uint8_t* from, uint64_t count) {
    int memory = -1;
    for (const Copy2d& copy : copies) {
      const auto* const at = static_cast<const uint8_t*>(copy.src);
      if (copy.rows == 0 || at < from || at >= from + count) continue;
      if (memory >= 0 && copy.memory != memory) return false;
      memory = copy.memory;
    }
    return memory >= 0;
  };
  for (const Copy2d& copy : copies) sum += static_cast<uint64_t>(copy.rows * copy.cols) * 2;
  for (size_t i = 0; i < split.runs.size(); i++) {
    const ByteRun& run = split.runs[i];
    CHECKF(run.bytes >= least && is_of_one_memory(run.src, run.bytes), "seed %lu", static_cast<unsigned long>(seed));
    std::memcpy(run.dst, run.src, run.bytes);
    bytes += run.bytes;
  }
  for (const Copy2d& copy : split.rest) {
    CHECKF(run_bytes(copy) < least, "seed %lu: a run of %lu is left", static_cast<unsigned long>(seed),
           static_cast<unsigned long>(run_bytes(copy)));
    const auto* const from = static_cast<const uint8_t*>(copy.src);
    CHECKF(run_bytes(copy) == 0 || is_of_one_memory(from, run_bytes(copy)), "seed %lu",
           static_cast<unsigned long>(seed));
    copy_plainly(copy);
    bytes += static_cast<uint64_t>(copy.rows * copy.cols) * 2;
  }
  CHECKF(bytes == sum && got == expected, "seed %lu: %lu bytes of %lu", static_cast<unsigned long>(seed),
         static_cast<unsigned long>(bytes), static_cast<unsigned long>(sum));
}

void long_runs_arrive(uint64_t seed, bool from_peer) {
  const PoolList list(seed);
  const auto bytes = random_bytes(seed, static_cast<size_t>(list.source) + 1);
  std::vector<uint8_t> expected(static_cast<size_t>(list.target) * 2 + 16, 0xA5), got = expected;
  if (from_peer) check(cudaSetDevice(1), "cudaSetDevice");
  const Gpu source(bytes.size());
  check(cudaMemcpy(source.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaSetDevice(0), "cudaSetDevice");
  const Gpu target(expected.size());
  check(cudaMemcpy(target.data(), expected.data(), expected.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  for (const Copy2d& copy : list.at(bytes.data(), expected.data())) copy_plainly(copy);
  Scatter scatter(Scatter::kTileBytes, true, uint64_t{1} << (seed % 15));
  scatter.run(list.at(source.data(), target.data()), nullptr);
  check(cudaDeviceSynchronize(), "scatter");
  check(cudaMemcpy(got.data(), target.data(), got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  CHECKF(got == expected, "seed %lu, peer %d", static_cast<unsigned long>(seed), int(from_peer));
}

// Adjacent allocations: the bytes of the next one are no part of a copy by the copy engine.
void neighbours_in_memory_arrive() {
  constexpr size_t kBytes = 2 << 20, kCount = 64;
  std::vector<std::unique_ptr<Gpu>> sources;
  for (size_t i = 0; i < kCount; i++) sources.push_back(std::make_unique<Gpu>(kBytes));
  std::sort(sources.begin(), sources.end(), [](const auto& a, const auto& b) { return a->data() < b->data(); });
  const Gpu target(kCount * kBytes);
  std::vector<Copy2d> copies;
  std::vector<uint8_t> expected;
  for (size_t i = 0; i < kCount; i++) {
    const auto bytes = random_bytes(i, kBytes);
    check(cudaMemcpy(sources[i]->data(), bytes.data(), kBytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    expected.insert(expected.end(), bytes.begin(), bytes.end());
    Copy2d copy{};
    copy.src = sources[i]->data();
    copy.dst = reinterpret_cast<Element*>(target.data() + i * kBytes);
    copy.rows = 1;
    copy.cols = copy.dst_cols = kBytes / 2;
    copy.src_col_bytes = 2;
    copy.dtype = cuda::kElementType;
    copy.memory = static_cast<int>(i);
    copies.push_back(copy);
  }
  Scatter scatter(Scatter::kTileBytes, true, kBytes);
  scatter.run(copies, nullptr);
  check(cudaDeviceSynchronize(), "scatter");
  std::vector<uint8_t> got(expected.size());
  check(cudaMemcpy(got.data(), target.data(), got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  CHECK(got == expected);
}

}  // namespace
