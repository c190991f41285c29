#include "binding/weights/sets.h"

#include <memory>
#include <utility>
#include <vector>

#include "binding/config.h"
#include "binding/core.h"
#include "binding/env_state.h"
#include "binding/fields.h"
#include "binding/weights/write_job.h"
#include "core/write/write_check.h"

namespace refit::binding {
namespace {

using Held = std::vector<Napi::Reference<Napi::Value>>;

class CopyTask : public Task {
 public:
  void run(Device& device, const std::atomic<bool>&) override { device.copy_weights(rects, from, to); }
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }

  std::vector<Rect> rects;
  int from = 0, to = 0;
};

class DropTask : public Task {
 public:
  explicit DropTask(int set) : set_(set) {}
  void run(Device& device, const std::atomic<bool>&) override { bytes_ = device.drop_set(set_); }
  Napi::Value result(Napi::Env env, const Held&) override {
    return Napi::Number::New(env, static_cast<double>(bytes_));
  }

 private:
  const int set_;
  uint64_t bytes_ = 0;
};

class RestoreTask : public Task {
 public:
  explicit RestoreTask(int set) : set_(set) {}
  void run(Device& device, const std::atomic<bool>&) override { device.restore_set(set_); }
  Napi::Value result(Napi::Env env, const Held&) override { return env.Undefined(); }

 private:
  const int set_;
};

Napi::Value submit_beside(const Napi::CallbackInfo& info, const std::shared_ptr<Core>& core,
                          std::shared_ptr<Task> task) {
  task->access.beside = true;
  return EnvState::of(info.Env()).submit(info.Env(), core, std::move(task), {});
}

}  // namespace

Napi::Value copy_weights(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  const CoreConfig& config = core->config();
  auto task = std::make_shared<CopyTask>();
  task->rects = parse_rects(info[1], "rects");
  task->from = to_set(info[2], "from", config);
  task->to = to_set(info[3], "to", config);
  for (const Rect& rect : task->rects) {
    check_read(rect.rank, rect.param, rect.dst_row, rect.dst_col, rect.rows, rect.cols, config.ranks, config.params);
  }
  return submit_beside(info, core, std::move(task));
}

Napi::Value drop_set(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  return submit_beside(info, core, std::make_shared<DropTask>(to_set(info[1], "set", core->config())));
}

Napi::Value restore_set(const Napi::CallbackInfo& info) {
  const auto core = core_of(info);
  return submit_beside(info, core, std::make_shared<RestoreTask>(to_set(info[1], "set", core->config())));
}

}  // namespace refit::binding
