// The exports of the addon: src/native.ts describes each, and which thread may call it.
#include <memory>
#include <new>
#include <stdexcept>

#include "binding/config.h"
#include "binding/core.h"
#include "binding/env_state.h"
#include "binding/fault_control.h"
#include "binding/fields.h"
#include "binding/napi_setup.h"
#include "binding/step.h"
#include "binding/weights.h"
#include "cpu/kernels.h"

namespace refit::binding {
namespace {

int handle_of(const Napi::CallbackInfo& info) { return static_cast<int>(to_integer(info[0], "handle", 0, 0x7fffffff)); }

Napi::Value isas(const Napi::CallbackInfo& info) {
  const std::vector<std::string> names = cpu::isas();
  Napi::Array out = Napi::Array::New(info.Env(), names.size());
  for (uint32_t i = 0; i < names.size(); i++) out.Set(i, names[i]);
  return out;
}

Napi::Value create_core(const Napi::CallbackInfo& info) {
  const CoreConfig config = parse_config(info[0]);
  try {
    return Napi::Number::New(info.Env(), register_core(std::make_shared<Core>(config)));
  } catch (const std::bad_alloc&) {
    double bytes = 0;
    for (const Param& param : config.params) bytes += static_cast<double>(param.rows) * static_cast<double>(param.cols);
    bytes *= static_cast<double>(size_of(config.dtype)) * config.ranks;
    throw std::runtime_error("not enough memory for " + std::to_string(static_cast<uint64_t>(bytes / 1e6)) +
                             " MB of weights and " + std::to_string(config.pages) + " KV pages of " +
                             std::to_string(config.page_size) + " tokens");
  }
}

void close_core(const Napi::CallbackInfo& info) { remove_core(handle_of(info))->close(); }

Napi::Value core_info(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = find_core(handle_of(info));
  const DeviceInfo device = core->device().info();
  const int params = static_cast<int>(core->config().params.size());
  std::vector<uint64_t> addresses;
  for (int rank = 0; rank < core->config().ranks; rank++) {
    for (int param = 0; param < params; param++) {
      addresses.push_back(reinterpret_cast<uintptr_t>(core->device().address(rank, param)));
    }
  }
  Napi::Object out = Napi::Object::New(env);
  out.Set("isa", device.isa);
  out.Set("threads", device.threads);
  out.Set("weightBytes", static_cast<double>(device.weight_bytes));
  out.Set("kvBytes", static_cast<double>(device.kv_bytes));
  out.Set("addresses", from_vector(env, addresses));
  return out;
}

Napi::Object init(Napi::Env env, Napi::Object exports) {
  EnvState::attach(env);
  const auto add = [&](const char* name, auto function) {
    exports.Set(name, Napi::Function::New(env, function, name));
  };
  exports.Set("faults", kFaults);
  add("isas", isas);
  add("createCore", create_core);
  add("closeCore", close_core);
  add("coreInfo", core_info);
  add("step", step);
  add("write", write);
  add("read", read);
  add("checksum", checksum);
  add("scramble", scramble);
  export_faults(env, exports);
  return exports;
}

NODE_API_MODULE(refit, init)

}  // namespace
}  // namespace refit::binding
