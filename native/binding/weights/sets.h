#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// copyWeights, dropSet and restoreSet of src/native/addon.ts. They run on the core's thread of operations beside steps.
Napi::Value copy_weights(const Napi::CallbackInfo& info);
Napi::Value drop_set(const Napi::CallbackInfo& info);
Napi::Value restore_set(const Napi::CallbackInfo& info);

}  // namespace refit::binding
