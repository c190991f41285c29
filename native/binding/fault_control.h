#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

constexpr bool kFaults =
#ifdef REFIT_FAULTS
    true;
#else
    false;
#endif

// Test builds: sets armFault and faultPending of src/native/addon.ts. Product builds: nothing.
void export_faults(Napi::Env env, Napi::Object exports);

}  // namespace refit::binding
