#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// step(handle, batch) of src/native/addon.ts. The batch's typed arrays are used where they lie.
Napi::Value step(const Napi::CallbackInfo& info);

}  // namespace refit::binding
