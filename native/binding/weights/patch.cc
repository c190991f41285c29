#include "binding/weights/patch.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/core.h"
#include "binding/env_state.h"
#include "binding/fields.h"
#include "binding/weights/write_job.h"
#include "codec/blake2b.h"
#include "codec/zstd_stream.h"
#include "core/write/element_patch.h"
#include "core/write/write_check.h"

namespace refit::binding {
namespace {

using Held = std::vector<Napi::Reference<Napi::Value>>;

// A Uint8Array's length is bounded by 2^32 on the oldest supported Node.
constexpr int64_t kMaxFetch = int64_t{1} << 31;

std::span<const uint8_t> borrow(const Napi::Value& value, const std::string& name, Held& held) {
  const auto bytes = fixed_bytes(value, name);
  held.push_back(Napi::Reference<Napi::Value>::New(value, 1));
  return bytes;
}

DType to_dtype(const Napi::Value& value, const std::string& name) {
  return static_cast<DType>(to_integer(value, name, 0, static_cast<int64_t>(kDTypes) - 1));
}

std::vector<ElementPatch> parse_patches(const Napi::Value& value, Held& held) {
  const Napi::Array list = to_array(value, "patches");
  std::vector<ElementPatch> out;
  out.reserve(list.Length());
  for (uint32_t i = 0; i < list.Length(); i++) {
    const Napi::HandleScope scope(value.Env());
    const std::string name = "patches[" + std::to_string(i) + "]";
    const Napi::Object object = to_object(list[i], name);
    ElementPatch patch;
    patch.encoding = static_cast<Positions>(to_integer(object.Get("encoding"), name + ".encoding", 0, 4));
    const auto positions = borrow(object.Get("positions"), name + ".positions", held);
    patch.positions = positions.data();
    patch.position_bytes = positions.size();
    patch.first = static_cast<uint64_t>(to_integer(object.Get("first"), name + ".first", 0, kMaxSafe));
    patch.dtype = to_dtype(object.Get("dtype"), name + ".dtype");
    const auto values = borrow(object.Get("values"), name + ".values", held);
    if (values.size() % size_of(patch.dtype) != 0) {
      throw Napi::RangeError::New(value.Env(), name + ".values: not of whole elements");
    }
    patch.values = values.data();
    patch.count = values.size() / size_of(patch.dtype);
    patch.is_xor = to_boolean(object.Get("xor"), name + ".xor");
    out.push_back(patch);
  }
  return out;
}

class FetchTask : public Task {
 public:
  void run(Device& device, const std::atomic<bool>&) override {
    device.fetch(owned.job.segments.front(), offset, bytes, timeout_ms, out);
  }
  Napi::Value result(Napi::Env, const Held& held) override { return held[0].Value(); }

  OwnedJob owned;
  uint64_t offset = 0, bytes = 0;
  int timeout_ms = 0;
  uint8_t* out = nullptr;
};

// Work on host memory only. It runs on the writer thread without the device, so steps continue meanwhile.
class HostOperation : public Operation {
 public:
  HostOperation() { borrows = true; }
  virtual void run() = 0;
};

Napi::Value submit_aside(Napi::Env env, const std::shared_ptr<Core>& core, std::shared_ptr<HostOperation> operation,
                         Held held) {
  Core* const raw = core.get();  // the core's destructor joins its thread
  HostOperation* const running = operation.get();
  return EnvState::of(env).submit_to(
      env, [raw](EnvState::Job job) { raw->post(std::move(job)); }, std::move(operation), [running] { running->run(); },
      std::move(held), nullptr);
}

class CheckOperation : public HostOperation {
 public:
  void run() override { refit::check_patches(patches, elements, dtype); }
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }

  std::vector<ElementPatch> patches;
  uint64_t elements = 0;
  DType dtype = DType::kBFloat16;
};

class ApplyOperation : public HostOperation {
 public:
  void run() override {
    for (const ElementPatch& patch : patches) changed_ += refit::apply_patch(patch, first, count, dtype, block);
  }
  Napi::Value result(Napi::Env env, const Held&) override {
    return Napi::Number::New(env, static_cast<double>(changed_));
  }

  std::vector<ElementPatch> patches;
  uint64_t first = 0, count = 0;
  DType dtype = DType::kBFloat16;
  uint8_t* block = nullptr;

 private:
  uint64_t changed_ = 0;
};

class HashOperation : public HostOperation {
 public:
  void run() override {
    hash_ = dtype ? refit::torch_hash(data.data(), data.size() / size_of(*dtype), *dtype)
                  : refit::torch_hash(data.data(), data.size());
  }
  Napi::Value result(Napi::Env env, const Held&) override { return Napi::BigInt::New(env, hash_); }

  std::span<const uint8_t> data;
  std::optional<DType> dtype;

 private:
  uint64_t hash_ = 0;
};

class UnpackOperation : public HostOperation {
 public:
  void run() override {
    const std::vector<uint8_t> digest = blake2b(data.data(), data.size(), wanted.size());
    if (!std::equal(digest.begin(), digest.end(), wanted.begin())) {
      throw std::runtime_error("its bytes have another BLAKE2b digest than was announced");
    }
    ZstdStream stream(data.data(), data.size());
    uint8_t more = 0;
    if (stream.read(into, size) != size || stream.read(&more, 1) != 0) {
      throw std::runtime_error("it does not hold the " + std::to_string(size) + " bytes that its frame announces");
    }
  }
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }

  std::span<const uint8_t> data;
  std::vector<uint8_t> wanted;
  uint8_t* into = nullptr;
  size_t size = 0;
};

DType to_held(const Napi::Value& value) {
  const DType dtype = to_dtype(value, "dtype");
  if (!format_of(dtype).held) {
    throw Napi::RangeError::New(value.Env(), std::string("dtype: no engine holds ") + name_of(dtype));
  }
  return dtype;
}

}  // namespace

Napi::Value fetch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  auto task = std::make_shared<FetchTask>();
  Held unused;
  task->owned.job.sources.push_back(parse_source(info[1], "source", task->owned, unused));
  if (task->owned.job.segments.empty()) throw Napi::TypeError::New(env, "source: expected a segment");
  check_write(task->owned.job, core->config().ranks, core->config().params);
  task->offset = static_cast<uint64_t>(to_integer(info[2], "offset", 0, kMaxSafe));
  task->bytes = static_cast<uint64_t>(to_integer(info[3], "bytes", 0, kMaxFetch));
  task->timeout_ms = static_cast<int>(to_integer(info[4], "timeoutMs", 0, kMaxInt));
  Napi::Uint8Array array = Napi::Uint8Array::New(env, static_cast<size_t>(task->bytes));
  task->out = array.Data();
  task->borrows = true;
  Held held;
  held.push_back(Napi::Reference<Napi::Value>::New(array, 1));
  return EnvState::of(env).submit(env, core, std::move(task), std::move(held));
}

Napi::Value check_patches(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<CheckOperation>();
  Held held;
  task->patches = parse_patches(info[1], held);
  task->elements = static_cast<uint64_t>(to_integer(info[2], "elements", 0, kMaxSafe));
  task->dtype = to_held(info[3]);
  return submit_aside(info.Env(), core, std::move(task), std::move(held));
}

Napi::Value apply_patches(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  auto task = std::make_shared<ApplyOperation>();
  Held held;
  task->patches = parse_patches(info[1], held);
  const auto block = borrow(info[2], "block", held);
  task->block = const_cast<uint8_t*>(block.data());
  task->first = static_cast<uint64_t>(to_integer(info[3], "first", 0, kMaxSafe));
  task->dtype = to_held(info[4]);
  if (block.size() % size_of(task->dtype) != 0) throw Napi::RangeError::New(env, "block: not of whole elements");
  task->count = block.size() / size_of(task->dtype);
  return submit_aside(env, core, std::move(task), std::move(held));
}

Napi::Value torch_hash(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<HashOperation>();
  Held held;
  task->data = borrow(info[1], "data", held);
  if (!info[2].IsNull()) task->dtype = to_dtype(info[2], "dtype");
  return submit_aside(info.Env(), core, std::move(task), std::move(held));
}

Napi::Value unpack_zstd(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<UnpackOperation>();
  Held held;
  task->data = borrow(info[1], "data", held);
  const auto digest = to_span<uint8_t>(info[2], "digest");
  if (digest.empty() || digest.size() > 64) throw Napi::RangeError::New(info.Env(), "digest: expected 1 to 64 bytes");
  task->wanted.assign(digest.begin(), digest.end());
  const auto into = borrow(info[3], "into", held);
  task->into = const_cast<uint8_t*>(into.data());
  task->size = into.size();
  return submit_aside(info.Env(), core, std::move(task), std::move(held));
}

}  // namespace refit::binding
