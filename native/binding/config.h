#pragma once
#include "binding/napi_setup.h"
#include "core/device.h"
#include "core/model.h"

namespace refit::binding {

// CoreConfig of src/native/addon.ts. The type and range of every field are checked here; the device checks
// whether they fit each other.
CoreConfig parse_config(const Napi::Value& value);

// The number of one of the core's sets of weights.
int to_set(const Napi::Value& value, const std::string& name, const CoreConfig& config);

// An Access of src/native/addon.ts, which may be absent.
Access to_access(const Napi::Value& value, const CoreConfig& config);

// The names of the fields of ModelRecipe, for a test that compares them with src/native/recipe.ts.
Napi::Value recipe_fields(const Napi::CallbackInfo& info);

}  // namespace refit::binding
