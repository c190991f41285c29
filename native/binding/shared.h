#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// takeDescriptor, dropFileReferences, dropCudaReferences and connectLocal of src/native/addon.ts.
Napi::Value connect_local(const Napi::CallbackInfo& info);
Napi::Value take_descriptor(const Napi::CallbackInfo& info);
Napi::Value drop_file_references(const Napi::CallbackInfo& info);
Napi::Value drop_cuda_references(const Napi::CallbackInfo& info);

}  // namespace refit::binding
