#include "binding/cuda.h"

#include "binding/config.h"
#include "binding/error_code.h"
#include "binding/fields.h"
#include "core/library/cuda_library.h"

namespace refit::binding {
namespace {

Napi::Object gpu(Napi::Env env, const CudaGpu& from) {
  Napi::Object out = Napi::Object::New(env);
  out.Set("ordinal", from.ordinal);
  out.Set("name", from.name);
  out.Set("uuid", from.uuid);
  out.Set("pciBusId", from.pci_bus_id);
  out.Set("computeCapability", from.compute_capability);
  out.Set("multiprocessors", from.multiprocessors);
  out.Set("totalBytes", static_cast<double>(from.total_bytes));
  out.Set("freeBytes", static_cast<double>(from.free_bytes));
  out.Set("virtualMemory", from.virtual_memory);
  out.Set("integrated", from.integrated);
  if (!from.error.empty()) out.Set("error", from.error);
  return out;
}

Napi::Object library(Napi::Env env, const CudaFoundLibrary& from) {
  Napi::Object out = Napi::Object::New(env);
  out.Set("name", from.name);
  if (!from.path.empty()) out.Set("path", from.path);
  if (!from.version.empty()) out.Set("version", from.version);
  if (!from.tried.empty()) out.Set("tried", from.tried);
  return out;
}

template <typename T, typename F>
Napi::Array array(Napi::Env env, const std::vector<T>& items, F&& make) {
  Napi::Array out = Napi::Array::New(env, items.size());
  for (uint32_t i = 0; i < items.size(); i++) out.Set(i, make(env, items[i]));
  return out;
}

}  // namespace

Napi::Value cuda_gpus(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const CudaGpus found = refit::cuda_gpus();
  Napi::Object out = Napi::Object::New(env);
  if (!found.error.empty()) out.Set("error", found.error);
  out.Set("driverCuda", found.driver_cuda);
  out.Set("runtimeCuda", found.runtime_cuda);
  out.Set("driverVersion", found.driver_version);
  out.Set("architectures", found.architectures);
  out.Set("gpus", array(env, found.gpus, gpu));
  const uint32_t count = static_cast<uint32_t>(found.gpus.size());
  Napi::Array peers = Napi::Array::New(env, count);
  for (uint32_t from = 0; from < count; from++) {
    Napi::Array row = Napi::Array::New(env, count);
    for (uint32_t to = 0; to < count; to++) {
      row.Set(to, Napi::Boolean::New(env, found.peer_access[size_t{from} * count + to] != 0));
    }
    peers.Set(from, row);
  }
  out.Set("peerAccess", peers);
  out.Set("libraries", array(env, found.libraries, library));
  return out;
}

Napi::Value cuda_memory_needs(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const CoreConfig config = parse_config(info[0]);
  const CudaMemoryPlan plan = with_error_code(env, [&] { return refit::cuda_memory_plan(config); });
  Napi::Object out = Napi::Object::New(env);
  out.Set("weightBytes", static_cast<double>(plan.weight_bytes));
  out.Set("spareBytes", static_cast<double>(plan.spare_bytes));
  out.Set("kvBytes", static_cast<double>(plan.kv_bytes));
  out.Set("scratchBytes", static_cast<double>(plan.scratch_bytes));
  out.Set("fixedBytes", static_cast<double>(plan.fixed_bytes));
  return out;
}

}  // namespace refit::binding
