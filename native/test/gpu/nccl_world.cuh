// Ranks that exchange through NCCL, and the values that they exchange. For nccl_test.cc.
#pragma once
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"
#include "cuda/exchange/exchange.h"
#include "cuda/exchange/peers.h"
#include "test/check.h"
#include "test/forward_reference.h"

namespace refit::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using test::TestModel;

constexpr double kPatience = 60;
constexpr uint8_t kPoison = 0xff;  // two of them: a NaN in Element, four in fp32
constexpr int64_t kGuard = 512;    // elements

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Depends on all indices of an element; values have different sizes, so the order of a sum shows in its bits.
float value(int call, int rank, int64_t i) {
  const uint32_t h = mix(static_cast<uint32_t>(i) * 2654435761u + mix(static_cast<uint32_t>(call * 16 + rank)));
  return round_element((static_cast<float>(h >> 8) * 0x1p-24f - 0.5f) * static_cast<float>(1u << (h & 7)));
}

std::vector<uint16_t> part_of(int call, int rank, int64_t count) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) bits[i] = element_bits(to_element(value(call, rank, i)));
  return bits;
}

// Against the sum in double precision, and bit for bit against the sum of the peers' kernels: fp32, in rank order,
// rounded once.
void check_sum(const std::vector<uint16_t>& got, int call, int ranks, int64_t count, const std::string& what) {
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    if (i >= (count + 7) / 8 * 8) {
      if (!CHECKF(got[i] == kPoison * 257, "%s: element %lld behind %lld was written", what.c_str(),
                  static_cast<long long>(i), static_cast<long long>(count)))
        return;
      continue;
    }
    if (i >= count) continue;
    float sum = value(call, 0, i);
    double exact = sum, size = std::abs(sum);
    for (int r = 1; r < ranks; ++r) {
      const float x = value(call, r, i);
      sum += x, exact += x, size += std::abs(x);
    }
    const float found = to_float(element_of_bits(got[i]));
    if (!CHECKF(std::abs(found - exact) <= 0.004 * std::abs(exact) + 1e-6 * size,
                "%s: element %lld of %lld is %.9g, expected %.9g", what.c_str(), static_cast<long long>(i),
                static_cast<long long>(count), found, exact))
      return;
    if (!CHECKF(got[i] == element_bits(to_element(sum)), "%s: element %lld of %lld is %.9g, in rank order it is %.9g",
                what.c_str(), static_cast<long long>(i), static_cast<long long>(count), found, round_element(sum)))
      return;
  }
}

template <class T>
struct Memory {
  explicit Memory(int64_t count) : count(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data), static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
    poison(nullptr);
    check(cudaDeviceSynchronize(), "poison");
  }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  void poison(cudaStream_t stream) {
    check(cudaMemsetAsync(data, kPoison, static_cast<size_t>(count) * sizeof(T), stream), "poison");
  }
  template <class H>
  std::vector<H> read(int64_t wanted) const {
    static_assert(sizeof(H) == sizeof(T));
    std::vector<H> host(static_cast<size_t>(wanted));
    check(cudaMemcpy(host.data(), data, host.size() * sizeof(H), cudaMemcpyDeviceToHost), "read");
    return host;
  }
  T* data = nullptr;
  const int64_t count;
};

// Ranks on the GPUs 0, 1, ...
std::vector<std::unique_ptr<Rank>> make_ranks(int count) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < count; ++r) ranks.push_back(std::make_unique<Rank>(r, r));
  return ranks;
}

void finish_all(std::vector<std::unique_ptr<Rank>>& ranks, std::vector<std::unique_ptr<NcclComm>>& comms) {
  on_all(ranks, [&](Rank& rank) { comms[rank.index]->finish(); });
}

// One rank of an engine that only has the exchange.
struct Side {
  Side(Rank& rank, const Layout& layout, const ForwardShape& shape, NcclComm& comm)
      : a(shape.exchange + kGuard),
        b(shape.exchange + kGuard),
        out(shape.tokens * layout.recipe.hidden + 8 + kGuard),
        logits(shape.rows * shape.logits_ld + kGuard) {
    RankBuffers own{};
    own.exchange[0] = a.data, own.exchange[1] = b.data, own.logits = logits.data;
    exchange = nccl_exchange(rank, layout, shape, own, comm);
  }
  void check_guards(const ForwardShape& shape) const {
    for (const auto* m : {&a, &b}) {
      const auto bits = m->read<uint16_t>(m->count);
      for (int64_t i = shape.exchange; i < m->count; ++i) {
        if (!CHECKF(bits[i] == kPoison * 257, "%lld elements behind an exchange buffer were written",
                    static_cast<long long>(i - shape.exchange)))
          return;
      }
    }
  }
  Memory<Element> a, b, out;
  Memory<float> logits;
  std::unique_ptr<Exchange> exchange;
};

}  // namespace
}  // namespace refit::cuda
