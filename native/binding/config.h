#pragma once
#include "binding/napi_setup.h"
#include "core/model.h"

namespace refit::binding {

// CoreConfig of src/native/addon.ts. Types and ranges of every field are checked here, what they mean together by the
// device.
CoreConfig parse_config(const Napi::Value& value);

}  // namespace refit::binding
