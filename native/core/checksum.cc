#include "core/checksum.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "core/store.h"

namespace refit {
namespace {

constexpr int64_t kTaskElements = 1 << 18;

template <typename T>
inline uint64_t sum_few(const T* data, uint64_t first, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    const uint64_t weight = checksum_weight(static_cast<int>(index % kChecksumGroup));
    sum += data[i] * (weight * checksum_factor(index / kChecksumGroup));
  }
  return sum;
}

// Whole groups, eight at a time: lane l of every inner loop is group l, so compilers can use vector instructions.
template <typename T>
inline __attribute__((always_inline)) uint64_t sum_groups(const T* data, uint64_t group, int64_t groups) {
  constexpr int kLanes = 8;
  constexpr int kWords = static_cast<int>(sizeof(T));  // of 8 bytes, in a group
  constexpr int kPerWord = kChecksumGroup / kWords;
  constexpr int kBits = 8 * static_cast<int>(sizeof(T));
  uint64_t sums[kLanes] = {};
  int64_t g = 0;
  for (; g + kLanes <= groups; g += kLanes) {
    uint64_t words[kLanes * kWords];
    uint64_t parts[kLanes] = {};
    std::memcpy(words, data + g * kChecksumGroup, sizeof words);
    for (int w = 0; w < kWords; w++) {
      for (int k = 0; k < kPerWord; k++) {
        const uint64_t weight = checksum_weight(w * kPerWord + k);
        for (int l = 0; l < kLanes; l++) {
          parts[l] += static_cast<uint64_t>(static_cast<T>(words[l * kWords + w] >> (k * kBits))) * weight;
        }
      }
    }
    for (int l = 0; l < kLanes; l++) sums[l] += parts[l] * checksum_factor(group + static_cast<uint64_t>(g + l));
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  const int64_t done = g * kChecksumGroup;
  return sum +
         sum_few(data + done, group * kChecksumGroup + static_cast<uint64_t>(done), (groups - g) * kChecksumGroup);
}

template <typename T>
inline __attribute__((always_inline)) uint64_t sum_run(const T* data, uint64_t first, int64_t n) {
  const auto to_group = static_cast<int64_t>((kChecksumGroup - first % kChecksumGroup) % kChecksumGroup);
  const int64_t head = std::min(n, to_group);
  const int64_t groups = (n - head) / kChecksumGroup;
  const int64_t whole = head + groups * kChecksumGroup;
  return sum_few(data, first, head) +
         sum_groups(data + head, (first + static_cast<uint64_t>(head)) / kChecksumGroup, groups) +
         sum_few(data + whole, first + static_cast<uint64_t>(whole), n - whole);
}

template <typename T>
uint64_t sum_base(const T* data, uint64_t first, int64_t n) {
  return sum_run(data, first, n);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2"))) uint64_t sum_avx2(const T* data, uint64_t first, int64_t n) {
  return sum_run(data, first, n);
}

// AVX-512 DQ multiplies 64-bit lanes in one instruction.
template <typename T>
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))) uint64_t sum_avx512(const T* data, uint64_t first,
                                                                                  int64_t n) {
  return sum_run(data, first, n);
}
#endif

template <typename T>
uint64_t sum_best(const T* data, uint64_t first, int64_t n) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return sum_avx512(data, first, n);
  }
  if (__builtin_cpu_supports("avx2")) return sum_avx2(data, first, n);
#endif
  return sum_base(data, first, n);
}

// A run of `rows` rows of one rectangle, as one unit of work.
struct Task {
  size_t rect;
  int64_t row, rows;
};

}  // namespace

uint64_t checksum_run(const void* data, DType dtype, uint64_t first, int64_t n) {
  if (size_of(dtype) == 2) return sum_best(static_cast<const uint16_t*>(data), first, n);
  return sum_best(static_cast<const uint32_t*>(data), first, n);
}

std::vector<uint64_t> Store::checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                      Pool& pool, int set) const {
  std::vector<Task> tasks;
  for (size_t i = 0; i < rects.size(); i++) {
    if (rects[i].cols == 0) continue;
    const int64_t height = std::max<int64_t>(1, kTaskElements / rects[i].cols);
    for (int64_t r = 0; r < rects[i].rows; r += height) tasks.push_back({i, r, std::min(height, rects[i].rows - r)});
  }
  const auto sums = std::make_unique<std::atomic<uint64_t>[]>(rects.size());
  pool.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t index, int) {
    const Task& task = tasks[index];
    const Rect& rect = rects[task.rect];
    const uint64_t src_cols = static_cast<uint64_t>(tensor_cols[rect.tensor]);
    const DType dtype = shapes_[rect.param].dtype;
    const uint64_t dst_cols = static_cast<uint64_t>(shapes_[rect.param].cols);
    const uint8_t* data = address(rect.rank, rect.param, set) +
                          (static_cast<uint64_t>(rect.dst_row + task.row) * dst_cols + rect.dst_col) * size_of(dtype);
    const uint64_t first = static_cast<uint64_t>(rect.src_row + task.row) * src_cols + rect.src_col;
    uint64_t sum = 0;
    if (src_cols == dst_cols && src_cols == static_cast<uint64_t>(rect.cols)) {
      sum = checksum_run(data, dtype, first, task.rows * rect.cols);
    } else {
      for (int64_t r = 0; r < task.rows; r++) {
        const uint64_t row = static_cast<uint64_t>(r);
        sum += checksum_run(data + row * dst_cols * size_of(dtype), dtype, first + row * src_cols, rect.cols);
      }
    }
    sums[task.rect].fetch_add(sum, std::memory_order_relaxed);
  });
  return {sums.get(), sums.get() + rects.size()};
}

void Store::scramble(uint64_t seed, Pool& pool, int set) {
  struct Part {
    size_t index;  // of the parameter, rank-major
    int64_t from, count;
  };
  std::vector<Part> parts;
  const size_t first = static_cast<size_t>(set) * ranks_ * shapes_.size();
  for (size_t a = 0; a < ranks_ * shapes_.size(); a++) {
    const Param& shape = shapes_[a % shapes_.size()];
    const int64_t elements = is_weight(shape) ? shape.rows * shape.cols : 0;
    for (int64_t e = 0; e < elements; e += kTaskElements)
      parts.push_back({a, e, std::min(kTaskElements, elements - e)});
  }
  pool.parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t index, int) {
    const Part& part = parts[index];
    const uint64_t key = scramble_key(seed, part.index);
    const DType dtype = shapes_[part.index % shapes_.size()].dtype;
    if (dtype == DType::kFloat32) {
      float* out = reinterpret_cast<float*>(addresses_[first + part.index]) + part.from;
      for (int64_t i = 0; i < part.count; i++) out[i] = scramble_noise(key, part.from + i);
    } else {
      uint16_t* out = reinterpret_cast<uint16_t*>(addresses_[first + part.index]) + part.from;
      for (int64_t i = 0; i < part.count; i++) {
        out[i] = static_cast<uint16_t>(from_float(dtype, scramble_noise(key, part.from + i)));
      }
    }
  });
}

}  // namespace refit
