#include "binding/step.h"

#include "binding/config.h"
#include "binding/core.h"
#include "binding/error_code.h"
#include "binding/fields.h"
#include "core/fault.h"
#include "core/step.h"

namespace refit::binding {
namespace {

template <typename T>
std::span<const T> field(const Napi::Object& batch, const char* name) {
  return to_span<T>(batch.Get(name), std::string("batch.") + name);
}

void expect(Napi::Env env, const char* name, size_t length, size_t expected, const char* why) {
  if (length == expected) return;
  throw Napi::RangeError::New(env, std::string("batch.") + name + ": expected " + std::to_string(expected) +
                                       " entries (" + why + "), got " + std::to_string(length));
}

StepBatch parse_batch(const Napi::Object& object, const CoreConfig& config) {
  StepBatch batch;
  if (const Napi::Value set = object.Get("set"); !set.IsUndefined()) batch.set = to_set(set, "batch.set", config);
  batch.tokens = field<int32_t>(object, "tokens");
  batch.seq_offsets = field<int32_t>(object, "seqOffsets");
  batch.start_pos = field<int32_t>(object, "startPos");
  batch.page_offsets = field<int32_t>(object, "pageOffsets");
  batch.pages = field<int32_t>(object, "pages");
  batch.row_ints = field<int32_t>(object, "rowInts");
  batch.row_floats = field<float>(object, "rowFloats");
  batch.row_seeds = field<uint64_t>(object, "rowSeeds");
  batch.history_offsets = field<int32_t>(object, "historyOffsets");
  batch.history = field<int32_t>(object, "history");
  batch.bias_offsets = field<int32_t>(object, "biasOffsets");
  batch.bias_tokens = field<int32_t>(object, "biasTokens");
  batch.bias_values = field<float>(object, "biasValues");
  batch.id_offsets = field<int32_t>(object, "idOffsets");
  batch.ids = field<int32_t>(object, "ids");
  batch.masks = field<uint32_t>(object, "masks");
  batch.adapters = field<int32_t>(object, "adapters");

  const Napi::Env env = object.Env();
  const size_t sequences = batch.start_pos.size();
  const size_t rows = batch.row_seeds.size();
  expect(env, "seqOffsets", batch.seq_offsets.size(), sequences + 1, "one more than startPos");
  expect(env, "pageOffsets", batch.page_offsets.size(), sequences + 1, "one more than startPos");
  expect(env, "rowInts", batch.row_ints.size(), rows * kRowInts, "ROW_INTS for each of rowSeeds");
  expect(env, "rowFloats", batch.row_floats.size(), rows * kRowFloats, "ROW_FLOATS for each of rowSeeds");
  expect(env, "historyOffsets", batch.history_offsets.size(), rows + 1, "one more than rowSeeds");
  expect(env, "biasOffsets", batch.bias_offsets.size(), rows + 1, "one more than rowSeeds");
  expect(env, "idOffsets", batch.id_offsets.size(), rows + 1, "one more than rowSeeds");
  expect(env, "biasValues", batch.bias_values.size(), batch.bias_tokens.size(), "as many as biasTokens");
  return batch;
}

}  // namespace

Napi::Value begin_step(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  const StepBatch batch = parse_batch(to_object(info[1], "batch"), core->config());
  with_error_code(info.Env(), [&] {
    core->with_device([&](Device& device) {
      if (REFIT_FAULT(kBegin)) throw std::runtime_error("injected fault: begin");
      device.begin(batch);
    });
  });
  return info.Env().Undefined();
}

Napi::Value collect_step(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  StepResult result;
  with_error_code(env, [&] {
    core->with_device([&](Device& device) {
      if (REFIT_FAULT(kStep)) throw DeviceLost("injected fault: rank 0 is lost in a step");
      device.collect(result);
      // The step has run and the device goes on, but nobody gets what it computed.
      if (REFIT_FAULT(kResult)) throw std::runtime_error("injected fault: result");
    });
  });
  Napi::Object out = Napi::Object::New(env);
  out.Set("tokens", from_vector(env, result.tokens));
  out.Set("logprobs", from_vector(env, result.logprobs));
  out.Set("topIds", from_vector(env, result.top_ids));
  out.Set("topLogprobs", from_vector(env, result.top_logprobs));
  out.Set("idLogprobs", from_vector(env, result.id_logprobs));
  out.Set("experts", from_vector(env, result.experts));
  out.Set("keptCounts", from_vector(env, result.kept_counts));
  out.Set("keptLogprobs", from_vector(env, result.kept_logprobs));
  out.Set("keptIds", from_vector(env, result.kept_ids));
  return out;
}

}  // namespace refit::binding
