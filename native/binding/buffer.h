#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// freeBuffer and pageOffset of src/native/addon.ts.
void free_buffer(const Napi::CallbackInfo& info);
Napi::Value page_offset(const Napi::CallbackInfo& info);

}  // namespace refit::binding
