#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// step(handle, batch) of src/native/addon.ts. Uses the batch's typed arrays in place.
Napi::Value step(const Napi::CallbackInfo& info);

}  // namespace refit::binding
