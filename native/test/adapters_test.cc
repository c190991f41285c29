// Steps with LoRA adapters on the CPU against models in double precision with the adapters merged into their weights;
// the same bits for a sequence alone and among others.
#include <atomic>
#include <string>
#include <thread>

#include "test/check.h"
#include "test/gpu/adapters/adapters_model.h"

using namespace refit;
using namespace refit::test;

namespace {

const std::vector<Variant> kVariants = {
    {"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false},
    {"llama, biases", 48, 2, 4, 4, 12, 80, 64, true, true, false, false},
    {"qwen3, tied, one kv head", 64, 1, 8, 1, 24, 64, 50, false, false, true, true},
    {"qwen3 moe", 64, 3, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0, 1}},
    {"olmo2", 64, 2, 8, 2, 16, 96, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
};
constexpr int kSlots = 3, kPageSize = 16;

std::unique_ptr<Device> device_of(const TestModel& model, const SlotAdapters& adapters, int ranks) {
  CoreConfig config = model.config(ranks, 2, "", 64, kPageSize);
  const size_t weights = config.params.size();
  adapters.extend(config);
  for (size_t p = weights; p < config.params.size(); ++p) {
    if (config.params[p].name != "adapters.table") config.params[p].dtype = model.dtype;
  }
  auto device = make_cpu_device(config);
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t p = 0; p < config.params.size(); ++p) {
      const Param& param = config.params[p];
      const std::vector<float> values =
          p < weights ? model.shard(param.name, rank, ranks).x : adapters.values(param.name, rank, ranks);
      void* const to = const_cast<void*>(device->address(rank, static_cast<int>(p)));
      for (size_t i = 0; i < values.size(); ++i) {
        if (param.dtype != DType::kFloat32) {
          static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(from_float(param.dtype, values[i]));
        } else {
          static_cast<float*>(to)[i] = values[i];
        }
      }
    }
  }
  return device;
}

struct Sequence {
  std::vector<int32_t> tokens;
  int32_t slot;
};

// For each token of each sequence the logprobs of the whole vocabulary, by id.
std::vector<std::vector<float>> logprobs(Device& device, const std::vector<Sequence>& sequences, int vocab) {
  BatchBuilder b;
  int32_t page = 0;
  for (const Sequence& s : sequences) {
    std::vector<int32_t> pages;
    for (size_t at = 0; at < s.tokens.size(); at += kPageSize) pages.push_back(page++);
    b.sequence(s.tokens, 0, pages);
    b.adapters.push_back(s.slot);
  }
  for (size_t t = 0; t < b.tokens.size(); ++t) {
    b.row({.token = static_cast<int32_t>(t), .target = b.tokens[t], .top = vocab, .flags = 3, .temperature = 0});
  }
  const StepResult result = b.run(device);
  std::vector<std::vector<float>> out(b.tokens.size(), std::vector<float>(vocab));
  for (size_t i = 0; i < result.top_ids.size(); ++i) out[i / vocab][result.top_ids[i]] = result.top_logprobs[i];
  return out;
}

double error_of(const std::vector<float>& got, const TestModel::Vec& logits) {
  double max = -1e300, sum = 0, most = 0;
  for (const double z : logits) max = std::max(max, z);
  for (const double z : logits) sum += std::exp(z - max);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double e = std::abs(got[i] - (logits[i] - max - std::log(sum)));
    if (!(e <= most)) most = e;
  }
  return most;
}

std::vector<Sequence> mixed_sequences(int vocab) {
  std::mt19937 rng(5);
  std::vector<Sequence> sequences;
  for (const int slot : {1, -1, 0, 2, 1, -1}) {
    Sequence s{{}, slot};
    for (int t = 0; t < 3 + 7 * static_cast<int>(sequences.size()); ++t)
      s.tokens.push_back(static_cast<int32_t>(rng() % vocab));
    sequences.push_back(std::move(s));
  }
  return sequences;
}

// CoreConfig::deterministic: any number of ranks gives the same bits.
void test_widths(const Variant& v, DType dtype) {
  TestModel model(v, dtype, 3);
  model.deterministic = true;
  const SlotAdapters adapters(model, kSlots, 32, 17);
  const std::vector<Sequence> sequences = mixed_sequences(v.vocab);
  const auto one = logprobs(*device_of(model, adapters, 1), sequences, v.vocab);
  for (const int ranks : {2, 4}) {
    CHECKF(logprobs(*device_of(model, adapters, ranks), sequences, v.vocab) == one, "%s: %d ranks give other bits",
           v.name, ranks);
  }
}

void test_variant(const Variant& v, int ranks) {
  const TestModel model(v, DType::kFloat32, 3);
  const SlotAdapters adapters(model, kSlots, 32, 17);
  const auto device = device_of(model, adapters, ranks);
  const std::vector<Sequence> sequences = mixed_sequences(v.vocab);
  const auto mixed = logprobs(*device, sequences, v.vocab);
  size_t at = 0;
  for (const Sequence& s : sequences) {
    const auto expected = (s.slot < 0 ? model : adapters.merged(s.slot)).logits(s.tokens);
    const auto alone = logprobs(*device, {s}, v.vocab);
    for (size_t t = 0; t < s.tokens.size(); ++t, ++at) {
      const double error = error_of(mixed[at], expected[t]);
      CHECKF(error < 2e-3, "%s, %d ranks, slot %d, token %zu: error %g", v.name, ranks, s.slot, t, error);
      CHECKF(mixed[at] == alone[t], "%s, %d ranks, slot %d: other requests change bits", v.name, ranks, s.slot);
    }
  }
}

// Noise in all weights leaves adapters alone, and a slot that does not exist is refused.
void test_slots() {
  const TestModel model(kVariants[0], DType::kBFloat16, 3);
  const SlotAdapters adapters(model, kSlots, 16, 17);
  const auto device = device_of(model, adapters, 1);
  CoreConfig config = model.config(1, 2, "", 64, kPageSize);
  const int embed = 0, table = static_cast<int>(config.params.size());
  const auto bytes = [&](int param, size_t count) {
    const auto* const from = static_cast<const uint8_t*>(device->address(0, param));
    return std::vector<uint8_t>(from, from + count);
  };
  const auto weights = bytes(embed, 64), slots = bytes(table, 256);
  device->scramble(3);
  CHECK(bytes(embed, 64) != weights);
  CHECK(bytes(table, 256) == slots);
  for (const int slot : {-2, kSlots}) {
    std::string what;
    try {
      logprobs(*device, {{{1, 2, 3}, slot}}, kVariants[0].vocab);
    } catch (const std::invalid_argument& e) {
      what = e.what();
    }
    CHECKF(what.find("adapter slot") != std::string::npos, "slot %d: \"%s\"", slot, what.c_str());
  }
}

// The parts of one slot in all parameters of adapters, on all ranks.
struct SlotWrite {
  SlotWrite(const SlotAdapters& adapters, const CoreConfig& config, int slot) {
    size_t count = 0;
    for (const Param& param : config.params) count += is_weight(param) ? 0 : config.ranks;
    values.reserve(count);
    for (size_t p = 0; p < config.params.size(); ++p) {
      const Param& param = config.params[p];
      if (is_weight(param)) continue;
      for (int rank = 0; rank < config.ranks; ++rank) {
        values.push_back(adapters.values(param.name, rank, config.ranks));
        const int64_t rows = param.rows / kSlots;
        const int index = static_cast<int>(job.tensors.size());
        const auto pitch = static_cast<uint64_t>(param.cols) * sizeof(float);
        job.sources.push_back({.data = reinterpret_cast<const uint8_t*>(values.back().data()),
                               .bytes = values.back().size() * sizeof(float)});
        job.tensors.push_back({index, static_cast<uint64_t>(slot * rows) * pitch, DType::kFloat32, rows, param.cols,
                               pitch, sizeof(float)});
        job.rects.push_back({index, rank, static_cast<int>(p), 0, 0, rows, param.cols, slot * rows, 0});
      }
    }
  }

  std::vector<std::vector<float>> values;
  WriteJob job;
};

// A slot that no sequence uses is written and read beside steps, which give the same bits; then it is used.
void test_beside_steps(int ranks) {
  const TestModel model(kVariants[3], DType::kFloat32, 3);
  const SlotAdapters adapters(model, kSlots, 16, 17), others(model, kSlots, 16, 18);
  const auto device = device_of(model, adapters, ranks);
  CoreConfig config = model.config(ranks, 2, "", 64, kPageSize);
  others.extend(config);
  const std::vector<Sequence> sequences = {{{1, 2, 3, 4, 5, 6, 7}, 0}, {{8, 9, 1}, -1}, {{7, 7, 3, 2, 60}, 1}};
  const auto before = logprobs(*device, sequences, kVariants[3].vocab);
  const SlotWrite write(others, config, 2);
  std::vector<int64_t> cols;
  for (const Tensor& tensor : write.job.tensors) cols.push_back(tensor.cols);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    do {
      const WriteOutcome outcome = device->write(write.job, Access{.beside = true});
      CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
      CHECK(device->checksum(write.job.rects, cols, Access{.beside = true}).size() == write.job.rects.size());
    } while (!stop);
  });
  for (int i = 0; i < 5; ++i) CHECK(logprobs(*device, sequences, kVariants[3].vocab) == before);
  stop = true;
  writer.join();
  const std::vector<Sequence> last = {{{1, 2, 3, 4, 5, 6, 7}, 2}};
  const auto fresh = device_of(model, others, ranks);
  CHECK(logprobs(*device, last, kVariants[3].vocab) == logprobs(*fresh, last, kVariants[3].vocab));
}

}  // namespace

int main() {
  for (const Variant& v : kVariants) {
    for (const int ranks : {1, 2, 4}) test_variant(v, ranks);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) test_widths(v, dtype);
  }
  test_slots();
  for (const int ranks : {1, 2}) test_beside_steps(ranks);
  return finish("adapters");
}
