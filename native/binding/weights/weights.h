#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// The operations on weights and memory of src/native/addon.ts. Malformed arguments throw before anything is queued; the
// work itself runs on the core's writer thread.
Napi::Value write(const Napi::CallbackInfo& info);
Napi::Value expect_write(const Napi::CallbackInfo& info);
Napi::Value read(const Napi::CallbackInfo& info);
Napi::Value checksum(const Napi::CallbackInfo& info);
Napi::Value scramble(const Napi::CallbackInfo& info);
Napi::Value release(const Napi::CallbackInfo& info);
Napi::Value resume(const Napi::CallbackInfo& info);
Napi::Value close_mappings(const Napi::CallbackInfo& info);

}  // namespace refit::binding
