#include "binding/row_layout.h"

#include <initializer_list>
#include <utility>

#include "core/device.h"
#include "core/dtype.h"
#include "core/step.h"
#include "core/write/element_patch.h"
#include "core/write/write.h"

namespace refit::binding {
namespace {

template <size_t N>
Napi::Array names(Napi::Env env, const std::array<const char*, N>& fields) {
  Napi::Array out = Napi::Array::New(env, N);
  for (uint32_t i = 0; i < N; i++) out.Set(i, fields[i]);
  return out;
}

template <typename T>
Napi::Object numbers(Napi::Env env, std::initializer_list<std::pair<const char*, T>> values) {
  Napi::Object out = Napi::Object::New(env);
  for (const auto& [name, value] : values) out.Set(name, Napi::Number::New(env, static_cast<double>(value)));
  return out;
}

Napi::Array dtypes(Napi::Env env) {
  Napi::Array out = Napi::Array::New(env, kDTypes);
  for (uint32_t i = 0; i < kDTypes; i++) {
    Napi::Object format = Napi::Object::New(env);
    format.Set("name", kFormats[i].name);
    format.Set("bytes", static_cast<double>(kFormats[i].bytes));
    format.Set("held", kFormats[i].held);
    out.Set(i, format);
  }
  return out;
}

}  // namespace

Napi::Object layouts(Napi::Env env) {
  using enum TensorState;
  using enum Positions;
  Napi::Object out = Napi::Object::New(env);
  out.Set("tensor", names(env, TensorRow::kNames));
  out.Set("rect", names(env, RectRow::kNames));
  out.Set("delta", names(env, DeltaRow::kNames));
  out.Set("part", names(env, PartRow::kNames));
  out.Set("message", names(env, MessageRow::kNames));
  out.Set("dtypes", dtypes(env));
  out.Set("tensorStates",
          numbers<TensorState>(env, {{"untouched", kUntouched}, {"partial", kPartial}, {"written", kWritten}}));
  out.Set("memoryTags", numbers<MemoryTag>(
                            env, {{"weights", kTagWeights}, {"kv_cache", kTagKvCache}, {"cuda_graph", kTagCudaGraph}}));
  out.Set("positions",
          numbers<Positions>(
              env, {{"int32", kInt32}, {"range", kRange}, {"gap16", kGap16}, {"gap32", kGap32}, {"gap64", kGap64}}));
  out.Set("step", numbers<int>(env, {{"rowInts", kRowInts},
                                     {"rowFloats", kRowFloats},
                                     {"wantLogprob", kRowWantLogprob},
                                     {"rawLogprob", kRowRawLogprob}}));
  return out;
}

}  // namespace refit::binding
