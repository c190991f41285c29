// Test models on a CUDA device: its configuration, the models' shards as an update writes them, and a prompt.
#pragma once
#include <random>
#include <vector>

#include "core/device.h"
#include "test/check.h"
#include "test/forward_reference.h"

namespace {

using namespace refit;
using namespace refit::test;

constexpr int kPages = 64, kPageSize = 16;
const Variant kDense{"qwen3", 128, 3, 4, 2, 64, 256, 321, false, false, true, true};
const Variant kSparse{"qwen3 moe", 64, 2, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 1}};

[[maybe_unused]] CoreConfig config_of(const TestModel& model, int ranks, int sets = 1) {
  CoreConfig config = model.config(ranks, 2, "", kPages, kPageSize);
  config.device = "cuda";
  config.gpus.assign(ranks, 0);
  config.share_gpus = true;
  config.max_step_tokens = 512, config.max_step_sequences = 16, config.max_context = 512;
  config.sets = sets;
  return config;
}

// The model's shards, written as an update writes them; all parameters as rectangles.
struct Shards {
  Shards(const TestModel& model, const CoreConfig& config) {
    for (int rank = 0; rank < config.ranks; rank++) {
      for (size_t p = 0; p < config.params.size(); p++) {
        const Matrix m = model.shard(config.params[p].name, rank, config.ranks);
        bits.emplace_back();
        for (const float x : m.x) bits.back().push_back(static_cast<uint16_t>(from_float(model.dtype, x)));
        const int index = static_cast<int>(job.tensors.size());
        job.tensors.push_back({index, 0, cuda::kElementType, m.rows, m.cols, static_cast<uint64_t>(m.cols) * 2, 2});
        job.rects.push_back({index, rank, static_cast<int>(p), 0, 0, m.rows, m.cols, 0, 0});
        cols.push_back(m.cols);
      }
    }
    for (const auto& b : bits) job.sources.push_back({-1, reinterpret_cast<const uint8_t*>(b.data()), b.size() * 2});
  }
  void write(Device& device, Access access) const {
    const WriteOutcome outcome = device.write(job, access);
    CHECKF(outcome.error.empty(), "write: %s", outcome.error.c_str());
    for (const uint8_t state : outcome.states) CHECK(state == static_cast<uint8_t>(TensorState::kWritten));
  }
  std::vector<uint64_t> sums(Device& device, Access access) const { return device.checksum(job.rects, cols, access); }

  std::vector<std::vector<uint16_t>> bits;
  std::vector<int64_t> cols;
  WriteJob job;
};

// A prompt of 100 tokens; every token is scored.
[[maybe_unused]] BatchBuilder prompt(const TestModel& model, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> tokens(100), pages{3, 9, 1, 60, 22, 7, 8};
  for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % model.v.vocab);
  BatchBuilder batch;
  batch.sequence(tokens, 0, pages);
  for (int t = 0; t < 100; t++) batch.row({.token = t, .top = 5, .temperature = 0});
  return batch;
}

}  // namespace
