#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// beginStep(handle, batch) and collectStep(handle) of src/native/addon.ts.
Napi::Value begin_step(const Napi::CallbackInfo& info);
Napi::Value collect_step(const Napi::CallbackInfo& info);

}  // namespace refit::binding
