// Copies with their expected results, and a scatter with guarded memory that runs them. For scatter_test.cc.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/check.h"
#include "cuda/scatter/scatter.h"
#include "test/check.h"
#include "test/gpu/scatter/scatter_world.cuh"

using namespace refit;
using namespace refit::cuda;

namespace {

constexpr uint16_t kPoison = 0xA5C3;

// A copy, its source's bytes, and its place in the target.
struct Case {
  std::vector<uint8_t> bytes;  // the whole source
  uint64_t offset = 0;         // place of element (0, 0) in it
  Copy2d copy = {};            // addresses are set later
  int64_t at = 0;              // element (0, 0) in the target
  int64_t extent() const { return (copy.rows - 1) * copy.dst_cols + copy.cols; }
};

uint16_t expected_bits(const Case& c, int64_t r, int64_t k) {
  const uint8_t* from = c.bytes.data() + c.offset + r * c.copy.src_row_bytes + k * c.copy.src_col_bytes;
  uint32_t bits = 0;
  std::memcpy(&bits, from, size_of(c.copy.dtype));
  return static_cast<uint16_t>(convert_bits(c.copy.dtype, kElementType, bits));
}

std::string describe(const Case& c) {
  char text[256];
  std::snprintf(text, sizeof text, "dtype %d, %ld x %ld, source +%lu strides %ld %ld, target +%ld of %ld columns",
                int(c.copy.dtype), long(c.copy.rows), long(c.copy.cols), static_cast<unsigned long>(c.offset),
                long(c.copy.src_row_bytes), long(c.copy.src_col_bytes), long(c.at), long(c.copy.dst_cols));
  return text;
}

// Any shape, stride and alignment; targets follow each other with gaps.
Case random_case(Random& random, int64_t most, int64_t& end) {
  Case c;
  const DType dtypes[] = {cuda::kElementType, DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  c.copy.dtype = dtypes[random.below(4)];
  const auto element = static_cast<int64_t>(size_of(c.copy.dtype));
  c.copy.rows = random.chance(4) ? 1 : 1 + random.below(random.chance(3) ? 200 : 12);
  c.copy.cols = random.chance(6) ? 1 : 1 + random.below(std::max<int64_t>(1, most / c.copy.rows));
  if (random.chance(2)) c.copy.cols = (c.copy.cols + 63) / 64 * 64;
  const int64_t step = random.chance(4) ? 1 + random.below(4) : 1;
  c.copy.src_col_bytes = element * step;
  c.copy.src_row_bytes = c.copy.cols * c.copy.src_col_bytes;
  const int64_t kind = random.below(8);
  if (kind < 3) {
    c.copy.src_row_bytes += random.chance(2) ? 16 * random.below(40) : random.below(100);
  } else if (kind == 3) {
    c.copy.src_row_bytes = element * step;
    c.copy.src_col_bytes = c.copy.rows * c.copy.src_row_bytes + (random.chance(2) ? 0 : random.below(33));
  } else if (kind == 4 && random.chance(3)) {
    (random.chance(2) ? c.copy.src_row_bytes : c.copy.src_col_bytes) = 0;
  }
  c.offset = static_cast<uint64_t>(random.chance(2)   ? 0
                                   : random.chance(2) ? element * random.below(17)
                                                      : random.below(40));
  const uint64_t size = c.offset + static_cast<uint64_t>((c.copy.rows - 1) * c.copy.src_row_bytes +
                                                         (c.copy.cols - 1) * c.copy.src_col_bytes + element);
  c.bytes.resize(size);
  for (size_t i = 0; i < size; i++) c.bytes[i] = static_cast<uint8_t>(random.next());
  c.copy.dst_cols = c.copy.cols + (random.chance(2) ? 0 : random.chance(2) ? 8 * random.below(9) : random.below(70));
  c.at = end + (random.chance(2) ? (8 - end % 8) % 8 : random.below(20));
  end = c.at + c.extent();
  return c;
}

std::vector<uint16_t> expected_target(const std::vector<Case>& cases, int64_t size) {
  std::vector<uint16_t> out(static_cast<size_t>(size), kPoison);
  for (const Case& c : cases) {
    for (int64_t r = 0; r < c.copy.rows; r++) {
      for (int64_t k = 0; k < c.copy.cols; k++) {
        out[static_cast<size_t>(c.at + r * c.copy.dst_cols + k)] = expected_bits(c, r, k);
      }
    }
  }
  return out;
}

// The memory of the sources. kMixed: some on this GPU, some on a peer.
enum class Where { kGpu, kPeer, kMixed, kPinned };

// A list with its sources and its target in GPU memory.
struct Fixture {
  std::vector<Case> cases;
  std::vector<std::unique_ptr<Gpu>> sources;
  std::vector<void*> pinned;
  std::unique_ptr<Gpu> target;
  std::vector<Copy2d> copies;
  int64_t end = 0;
  static constexpr int64_t kGuard = 512;

  ~Fixture() {
    for (void* p : pinned) cudaFreeHost(p);
  }

  void place(Where where) {
    int memory = 0;
    for (Case& c : cases) {
      uint8_t* data = nullptr;
      if (where == Where::kPinned) {
        void* p = nullptr;
        check(cudaHostAlloc(&p, c.bytes.size(), cudaHostAllocPortable), "cudaHostAlloc");
        pinned.push_back(p);
        data = static_cast<uint8_t*>(p);
        std::memcpy(data, c.bytes.data(), c.bytes.size());
      } else {
        const bool on_peer = where == Where::kPeer || (where == Where::kMixed && sources.size() % 3 == 1);
        if (on_peer) check(cudaSetDevice(1), "cudaSetDevice");
        sources.push_back(std::make_unique<Gpu>(c.bytes.size()));
        data = sources.back()->data();
        check(cudaMemcpy(data, c.bytes.data(), c.bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
        check(cudaSetDevice(0), "cudaSetDevice");
      }
      c.copy.src = data + c.offset;
      c.copy.memory = memory++;
    }
    target = std::make_unique<Gpu>(static_cast<size_t>(end + 2 * kGuard) * 2);
    for (Case& c : cases) {
      c.copy.dst = reinterpret_cast<Element*>(target->data()) + kGuard + c.at;
      copies.push_back(c.copy);
    }
  }

  void poison() {
    std::vector<uint16_t> all(static_cast<size_t>(end + 2 * kGuard), kPoison);
    check(cudaMemcpy(target->data(), all.data(), all.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  void compare(const std::string& what) {
    std::vector<uint16_t> got(static_cast<size_t>(end + 2 * kGuard));
    check(cudaMemcpy(got.data(), target->data(), got.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const auto expected = expected_target(cases, end);
    for (const Case& c : cases) {
      bool fine = true;
      for (int64_t r = 0; r < c.copy.rows && fine; r++) {
        for (int64_t k = 0; k < c.copy.cols && fine; k++) {
          const auto at = static_cast<size_t>(c.at + r * c.copy.dst_cols + k);
          fine = CHECKF(got[kGuard + at] == expected[at], "%s, %s: element %ld, %ld: expected %04x, got %04x",
                        what.c_str(), describe(c).c_str(), long(r), long(k), expected[at], got[kGuard + at]);
        }
      }
    }
    size_t touched = 0;
    for (size_t i = 0; i < got.size(); i++) {
      const bool inside = i >= kGuard && i < kGuard + expected.size();
      const uint16_t want = inside ? expected[i - kGuard] : kPoison;
      if (got[i] != want && touched++ == 0) {
        CHECKF(false, "%s: element %ld of the target is %04x and not %04x", what.c_str(), long(i) - long(kGuard),
               got[i], want);
      }
    }
  }
};

}  // namespace
