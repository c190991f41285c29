// Random adapters and steps, and the products that the kernels of adapters compute, on the host in double.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "cuda/adapters/adapter_segments.h"
#include "cuda/adapters/adapters.h"
#include "test/gpu/matrix_common.cuh"
#include "test/random.h"

namespace refit::test {

using cuda::AdapterSegments;
using cuda::AdapterWeights;

inline float value_of(Element v) { return to_float(v); }
inline int padded_rank(int rank) { return (rank + 15) / 16 * 16; }

// The adapters of one linear in all slots, on the host and on the GPU.
struct Adapters {
  Adapters(Random& random, int slots, int rank, int64_t K, const std::vector<int64_t>& columns)
      : slots(slots), rank(rank), slices(static_cast<int>(columns.size())), K(K), columns(columns) {
    for (const int64_t n : columns) all += n;
    const int rows = slices + 2;  // of the table in a slot: the first and the last belong to other linears
    table.assign(static_cast<size_t>(slots) * rows * 2, 1e9f);
    a.resize(static_cast<size_t>(slots * slices * rank * K));
    b.resize(static_cast<size_t>(slots * all * rank));
    for (int s = 0; s < slots; s++) {
      int64_t first = 0;
      for (int i = 0; i < slices; first += columns[static_cast<size_t>(i++)]) {
        const int own = random.chance(5) ? 0 : 1 + static_cast<int>(random.below(rank));
        float* const entry = &table[(static_cast<size_t>(s) * rows + 1 + static_cast<size_t>(i)) * 2];
        entry[0] = 0.25f + static_cast<float>(random.below(100)) / 50, entry[1] = static_cast<float>(own);
        for (int r = 0; r < rank; r++) {
          for (int64_t k = 0; k < K; k++) a[((s * slices + i) * int64_t{rank} + r) * K + k] = number(random, r, own);
          for (int64_t n = 0; n < columns[static_cast<size_t>(i)]; n++)
            b[(s * all + first + n) * rank + r] = number(random, r, own);
        }
      }
    }
    gpu_a.put(a), gpu_b.put(b), gpu_table.put(table);
  }

  // A number of row r of A, or of column r of B: zero from the adapter's rank on, and behind the padding anything.
  static Element number(Random& random, int r, int own) {
    if (r >= own && r < padded_rank(own)) return {0.0f};
    const float v = static_cast<float>(random.below(2001) - 1000) / 1000;
    return to_element(r < own ? v : v * 1e4f);
  }
  const float* entry(int slot, int slice) const {
    return &table[(static_cast<size_t>(slot) * (slices + 2) + 1 + static_cast<size_t>(slice)) * 2];
  }
  int rank_of(int slot, int slice) const { return static_cast<int>(entry(slot, slice)[1]); }

  AdapterWeights weights() {
    AdapterWeights w{gpu_a.data(), gpu_b.data(), gpu_table.data() + 2, 2 * (int64_t{slices} + 2), rank, slices, {}};
    std::copy(columns.begin(), columns.end(), w.columns);
    return w;
  }
  std::string text() const {
    std::string text = std::to_string(slots) + " slots of rank " + std::to_string(rank) + ", K " + std::to_string(K);
    for (const int64_t n : columns) text += ", " + std::to_string(n);
    return text;
  }

  int slots, rank, slices;
  int64_t K, all = 0;
  std::vector<int64_t> columns;
  std::vector<Element> a, b;
  std::vector<float> table;
  Buffer<Element> gpu_a{a_size()}, gpu_b{b_size()};
  Buffer<float> gpu_table{static_cast<size_t>(slots) * (slices + 2) * 2};

 private:
  size_t a_size() const { return static_cast<size_t>(slots * slices * rank * K); }
  size_t b_size() const {
    int64_t sum = 0;
    for (const int64_t n : columns) sum += n;
    return static_cast<size_t>(slots * sum * rank);
  }
};

// Rows in runs of one slot, some of the base model.
inline std::vector<int32_t> random_slots(Random& random, int64_t rows, int slots, int64_t longest) {
  std::vector<int32_t> out;
  while (static_cast<int64_t>(out.size()) < rows) {
    const auto slot = static_cast<int32_t>(random.below(slots + 1)) - 1;
    const int64_t run = std::min(rows - static_cast<int64_t>(out.size()), 1 + random.below(longest));
    out.insert(out.end(), static_cast<size_t>(run), slot);
  }
  return out;
}

// A step's segments on the GPU.
class Segments {
 public:
  explicit Segments(const std::vector<int32_t>& slots)
      : host_(cuda::cut_segments(slots)), gpu_(std::max<size_t>(1, host_.list.size())) {
    gpu_.put(host_.list);
  }
  AdapterSegments get() { return host_.at(gpu_.data()); }

 private:
  cuda::SegmentList host_;
  Buffer<cuda::AdapterSegment> gpu_;
};

struct Sum {
  double value = 0, size = 0;  // size: of the absolute products
  void add(double x, double y) { value += x * y, size += std::abs(x * y); }
};

}  // namespace refit::test
