#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// dropFileReferences and dropCudaReference of src/native.ts.
Napi::Value drop_file_references(const Napi::CallbackInfo& info);
Napi::Value drop_cuda_reference(const Napi::CallbackInfo& info);

}  // namespace refit::binding
