#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// cudaGpus and cudaMemoryNeeds of src/native/addon.ts.
Napi::Value cuda_gpus(const Napi::CallbackInfo& info);
Napi::Value cuda_memory_needs(const Napi::CallbackInfo& info);

}  // namespace refit::binding
