#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// lockFile, hasWriter and applyDeltas of src/native/addon.ts.
Napi::Value lock_file(const Napi::CallbackInfo& info);
Napi::Value has_writer(const Napi::CallbackInfo& info);
Napi::Value apply_deltas(const Napi::CallbackInfo& info);

}  // namespace refit::binding
