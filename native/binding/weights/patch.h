#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// fetch, checkPatches, applyPatches, torchHash and unpackZstd of src/native/deltas.ts.
Napi::Value fetch(const Napi::CallbackInfo& info);
Napi::Value check_patches(const Napi::CallbackInfo& info);
Napi::Value apply_patches(const Napi::CallbackInfo& info);
Napi::Value torch_hash(const Napi::CallbackInfo& info);
Napi::Value unpack_zstd(const Napi::CallbackInfo& info);

}  // namespace refit::binding
