#include "binding/weights/weights.h"

#include <optional>
#include <stdexcept>
#include <utility>

#include "binding/config.h"
#include "binding/core.h"
#include "binding/env_state.h"
#include "binding/fields.h"
#include "binding/weights/write_job.h"
#include "core/write/write_check.h"

namespace refit::binding {
namespace {

using Held = std::vector<Napi::Reference<Napi::Value>>;

// A Uint8Array's length is bounded by 2^32 on the oldest supported Node.
constexpr uint64_t kMaxReadBytes = uint64_t{1} << 32;

// Rectangles whose checksums are wanted, and the columns of the tensors that they name.
struct Sums {
  std::vector<Rect> rects;
  std::vector<int64_t> tensor_cols;
};

Sums parse_sums(const Napi::Value& rects, const Napi::Value& tensor_cols, const CoreConfig& config) {
  Sums sums{parse_rects(rects, "rects"), {}};
  const auto cols = to_span<double>(tensor_cols, "tensorCols");
  for (size_t i = 0; i < cols.size(); i++) {
    sums.tensor_cols.push_back(exact_integer(rects.Env(), cols[i], kMaxSafe, "tensorCols", i, ""));
  }
  check_checksum(sums.rects, sums.tensor_cols, config.ranks, config.params);
  return sums;
}

class WriteTask : public Task {
 public:
  void run(Device& device, const std::atomic<bool>& cancel) override {
    // Returns the slots here, also when the write throws. Freeing the task would be too late: the slots are received
    // into next, and the thread that frees it may be the one that waits for them.
    const auto kept = std::move(owned.kept);
    owned.job.cancel = &cancel;
    outcome_ = device.write(owned.job, access);
    // Here, because another task would wait for two more changes of threads.
    if (sums_after && outcome_.error.empty())
      sums_ = device.checksum(sums_after->rects, sums_after->tensor_cols, access);
  }

  Napi::Value result(Napi::Env env, const Held&) override {
    Napi::Object out = Napi::Object::New(env);
    out.Set("states", from_vector(env, outcome_.states));
    out.Set("bytes", static_cast<double>(outcome_.bytes));
    out.Set("segmentsOpened", static_cast<double>(outcome_.segments_opened));
    out.Set("segmentsClosed", static_cast<double>(outcome_.segments_closed));
    if (!outcome_.warning.empty()) out.Set("warning", outcome_.warning);
    if (sums_after && outcome_.error.empty()) out.Set("sums", from_vector(env, sums_));
    if (!outcome_.error.empty()) {
      Napi::Object error = Napi::Object::New(env);
      error.Set("message", outcome_.error);
      error.Set("tensor", outcome_.error_tensor);
      out.Set("error", error);
    }
    return out;
  }

  OwnedJob owned;
  std::optional<Sums> sums_after;

 private:
  WriteOutcome outcome_;
  std::vector<uint64_t> sums_;
};

// Copies straight into the array that the promise resolves to.
class ReadTask : public Task {
 public:
  ReadTask(uint8_t* out, int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols)
      : out_(out), rank_(rank), param_(param), row_(row), col_(col), rows_(rows), cols_(cols) {
    borrows = true;
  }

  void run(Device& device, const std::atomic<bool>&) override {
    device.read(rank_, param_, row_, col_, rows_, cols_, out_, access);
  }

  Napi::Value result(Napi::Env, const Held& held) override { return held[0].Value(); }

 private:
  uint8_t* const out_;
  const int rank_, param_;
  const int64_t row_, col_, rows_, cols_;
};

class ChecksumTask : public Task {
 public:
  explicit ChecksumTask(Sums wanted) : wanted_(std::move(wanted)) {}
  void run(Device& device, const std::atomic<bool>&) override {
    sums_ = device.checksum(wanted_.rects, wanted_.tensor_cols, access);
  }
  Napi::Value result(Napi::Env env, const Held&) override { return from_vector(env, sums_); }

 private:
  const Sums wanted_;
  std::vector<uint64_t> sums_;
};

class ScrambleTask : public Task {
 public:
  explicit ScrambleTask(uint64_t seed) : seed_(seed) {}
  void run(Device& device, const std::atomic<bool>&) override { device.scramble(seed_, access.set); }
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }

 private:
  const uint64_t seed_;
};

class ReleaseTask : public Task {
 public:
  ReleaseTask(uint32_t tags, bool keep_weights) : tags_(tags), keep_weights_(keep_weights) {}
  void run(Device& device, const std::atomic<bool>&) override { bytes_ = device.release_memory(tags_, keep_weights_); }
  Napi::Value result(Napi::Env env, const Held&) override {
    return Napi::Number::New(env, static_cast<double>(bytes_));
  }

 private:
  const uint32_t tags_;
  const bool keep_weights_;
  uint64_t bytes_ = 0;
};

class ResumeTask : public Task {
 public:
  explicit ResumeTask(uint32_t tags) : tags_(tags) {}
  void run(Device& device, const std::atomic<bool>&) override { kept_ = device.resume_memory(tags_); }
  Napi::Value result(Napi::Env env, const Held&) override { return Napi::Boolean::New(env, kept_); }

 private:
  const uint32_t tags_;
  bool kept_ = false;
};

class CloseMappingsTask : public Task {
 public:
  explicit CloseMappingsTask(std::string name) : name_(std::move(name)) {}
  void run(Device& device, const std::atomic<bool>&) override { closed_ = device.close_mappings(name_, access); }
  Napi::Value result(Napi::Env env, const Held&) override {
    return Napi::Number::New(env, static_cast<double>(closed_));
  }

 private:
  const std::string name_;
  uint64_t closed_ = 0;
};

uint32_t to_tags(const Napi::Value& value) {
  return static_cast<uint32_t>(to_integer(value, "tags", 0, kTagWeights | kTagKvCache | kTagCudaGraph));
}

}  // namespace

Napi::Value write(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<WriteTask>();
  Held held;
  parse_job(info[1], task->owned, held);
  check_write(task->owned.job, core->config().ranks, core->config().params);
  const Napi::Value sums = to_object(info[1], "job").Get("sums");
  if (!sums.IsUndefined()) {
    const Napi::Object wanted = to_object(sums, "job.sums");
    task->sums_after = parse_sums(wanted.Get("rects"), wanted.Get("cols"), core->config());
  }
  task->borrows = !held.empty();
  task->access = to_access(info[2], core->config());
  return EnvState::of(info.Env()).submit(info.Env(), core, std::move(task), std::move(held));
}

Napi::Value expect_write(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  Core* const raw = core.get();  // the core's destructor joins its thread
  core->post([raw] {
    try {
      raw->with_device([](Device& device) { device.write({}); });
    } catch (const std::exception&) {
      // The next write reports it.
    }
  });
  return info.Env().Undefined();
}

Napi::Value read(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  const int rank = static_cast<int>(to_integer(info[1], "rank", 0, 0x7fffffff));
  const int param = static_cast<int>(to_integer(info[2], "param", 0, 0x7fffffff));
  const int64_t row = to_integer(info[3], "row", 0, kMaxSafe);
  const int64_t col = to_integer(info[4], "col", 0, kMaxSafe);
  const int64_t rows = to_integer(info[5], "rows", 0, kMaxSafe);
  const int64_t cols = to_integer(info[6], "cols", 0, kMaxSafe);
  check_read(rank, param, row, col, rows, cols, core->config().ranks, core->config().params);
  // A rectangle inside an existing parameter, so the product fits.
  const uint64_t bytes =
      static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * size_of(core->config().params[param].dtype);
  if (bytes >= kMaxReadBytes) {
    throw std::invalid_argument("read: " + std::to_string(bytes) + " bytes requested, expected fewer than " +
                                std::to_string(kMaxReadBytes) + "; read fewer rows at a time");
  }
  Napi::Uint8Array array = Napi::Uint8Array::New(env, static_cast<size_t>(bytes));
  Held held;
  held.push_back(Napi::Reference<Napi::Value>::New(array, 1));
  auto task = std::make_shared<ReadTask>(array.Data(), rank, param, row, col, rows, cols);
  task->access = to_access(info[7], core->config());
  return EnvState::of(env).submit(env, core, std::move(task), std::move(held));
}

Napi::Value checksum(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  auto task = std::make_shared<ChecksumTask>(parse_sums(info[1], info[2], core->config()));
  task->access = to_access(info[3], core->config());
  return EnvState::of(env).submit(env, core, std::move(task), {});
}

Napi::Value scramble(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
  if (!info[1].IsBigInt()) {
    throw Napi::TypeError::New(env, "seed: expected a bigint, got " + describe(info[1]));
  }
  bool lossless = false;
  const uint64_t seed = info[1].As<Napi::BigInt>().Uint64Value(&lossless);
  if (!lossless) throw Napi::RangeError::New(env, "seed: expected a bigint from 0 to 2^64 - 1");
  auto task = std::make_shared<ScrambleTask>(seed);
  task->access = to_access(info[2], core->config());
  return EnvState::of(env).submit(env, core, std::move(task), {});
}

Napi::Value release(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<ReleaseTask>(to_tags(info[1]), to_boolean(info[2], "keepWeights"));
  return EnvState::of(info.Env()).submit(info.Env(), core, std::move(task), {});
}

Napi::Value resume(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  return EnvState::of(info.Env()).submit(info.Env(), core, std::make_shared<ResumeTask>(to_tags(info[1])), {});
}

Napi::Value close_mappings(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  auto task = std::make_shared<CloseMappingsTask>(to_string(info[1], "name"));
  task->access = to_access(info[2], core->config());
  return EnvState::of(info.Env()).submit(info.Env(), core, std::move(task), {});
}

}  // namespace refit::binding
