// The exports of the addon: src/native/addon.ts describes each, and which thread may call it.
#include <unistd.h>

#include <memory>
#include <new>

#include "binding/buffer.h"
#include "binding/config.h"
#include "binding/core.h"
#include "binding/cuda.h"
#include "binding/env_state.h"
#include "binding/error_code.h"
#include "binding/fault_control.h"
#include "binding/fields.h"
#include "binding/groups/groups.h"
#include "binding/groups/nccl_groups.h"
#include "binding/handles.h"
#include "binding/napi_setup.h"
#include "binding/pickle.h"
#include "binding/row_layout.h"
#include "binding/shared.h"
#include "binding/step.h"
#include "binding/weights/delta.h"
#include "binding/weights/patch.h"
#include "binding/weights/sets.h"
#include "binding/weights/weights.h"
#include "core/memory_error.h"
#include "cpu/kernels.h"

namespace refit::binding {
namespace {

Napi::Value isas(const Napi::CallbackInfo& info) {
  const std::vector<std::string> names = cpu::isas();
  Napi::Array out = Napi::Array::New(info.Env(), names.size());
  for (uint32_t i = 0; i < names.size(); i++) out.Set(i, names[i]);
  return out;
}

[[noreturn]] void throw_no_memory(const CoreConfig& config) {
  double bytes = 0;
  for (const Param& param : config.params) {
    bytes += static_cast<double>(param.rows) * static_cast<double>(param.cols) *
             static_cast<double>(size_of(param.dtype)) * config.ranks;
  }
  throw NoMemory("not enough memory for " + std::to_string(static_cast<uint64_t>(bytes / 1e6)) + " MB of weights and " +
                 std::to_string(config.pages) + " KV pages of " + std::to_string(config.page_size) + " tokens");
}

Napi::Value create_core(const Napi::CallbackInfo& info) {
  const CoreConfig config = parse_config(info[0]);
  return with_error_code(info.Env(), [&]() -> Napi::Value {
    try {
      return Napi::Number::New(info.Env(), register_core(std::make_shared<Core>(config)));
    } catch (const NoMemory&) {
      throw;  // its message says more than ours would
    } catch (const std::bad_alloc&) {
      throw_no_memory(config);
    }
  });
}

void close_core(const Napi::CallbackInfo& info) { remove_core(core_handle_of(info))->close(); }

Napi::Value core_info(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto core = core_of(info);
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
  out.Set("spareBytes", static_cast<double>(device.spare_bytes));
  out.Set("kvBytes", static_cast<double>(device.kv_bytes));
  out.Set("addresses", from_vector(env, addresses));
  return out;
}

void end_process(const Napi::CallbackInfo& info) { _exit(static_cast<int>(to_integer(info[0], "exitCode", 0, 255))); }

Napi::Object init(Napi::Env env, Napi::Object exports) {
  EnvState::attach(env);
  const auto add = [&](const char* name, auto function) {
    exports.Set(name, Napi::Function::New(env, function, name));
  };
  exports.Set("faults", kFaults);
  exports.Set("layouts", layouts(env));
  add("isas", isas);
  add("cudaGpus", cuda_gpus);
  add("cudaMemoryNeeds", cuda_memory_needs);
  add("endProcess", end_process);
  add("recipeFields", recipe_fields);
  add("createCore", create_core);
  add("closeCore", close_core);
  add("coreInfo", core_info);
  add("beginStep", begin_step);
  add("collectStep", collect_step);
  add("write", write);
  add("expectWrite", expect_write);
  add("read", read);
  add("checksum", checksum);
  add("scramble", scramble);
  add("release", release);
  add("resume", resume);
  add("closeMappings", close_mappings);
  add("copyWeights", copy_weights);
  add("dropSet", drop_set);
  add("restoreSet", restore_set);
  add("glooGroup", gloo_group);
  add("glooConnect", gloo_connect);
  add("ncclGroup", nccl_group);
  add("ncclLibrary", nccl_library);
  add("ncclUniqueId", nccl_unique_id);
  add("ncclConnect", nccl_connect);
  add("stageGroup", stage_group);
  add("groupReceive", group_receive);
  add("groupReceiveMessages", group_receive_messages);
  add("groupPlaces", group_places);
  add("groupBegin", group_begin);
  add("groupArrive", group_arrive);
  add("groupBeginMessages", group_begin_messages);
  add("groupReceiveInPlace", group_receive_in_place);
  add("groupRead", group_read);
  add("groupSend", group_send);
  add("groupParams", group_params);
  add("groupBarrier", group_barrier);
  add("groupAbort", group_abort);
  add("endGroup", end_group);
  add("freeBuffer", free_buffer);
  add("pageOffset", page_offset);
  add("readHandles", read_handles);
  add("readPickle", read_pickle);
  add("takeDescriptor", take_descriptor);
  add("connectLocal", connect_local);
  add("fetch", fetch);
  add("checkPatches", check_patches);
  add("applyPatches", apply_patches);
  add("torchHash", torch_hash);
  add("unpackZstd", unpack_zstd);
  add("lockFile", lock_file);
  add("hasWriter", has_writer);
  add("applyDeltas", apply_deltas);
  add("dropFileReferences", drop_file_references);
  add("dropCudaReferences", drop_cuda_references);
  export_faults(env, exports);
  return exports;
}

NODE_API_MODULE(refit, init)

}  // namespace
}  // namespace refit::binding
