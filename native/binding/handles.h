#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// readHandles of src/native/addon.ts.
Napi::Value read_handles(const Napi::CallbackInfo& info);

}  // namespace refit::binding
