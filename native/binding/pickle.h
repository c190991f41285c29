#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// readPickle of src/native/pickle.ts.
Napi::Value read_pickle(const Napi::CallbackInfo& info);

}  // namespace refit::binding
