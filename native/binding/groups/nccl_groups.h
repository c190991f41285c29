#pragma once
#include "binding/napi_setup.h"

namespace refit::binding {

// The functions of src/native/groups.ts for NCCL only; binding/groups/groups.h has those that gloo shares.
Napi::Value nccl_group(const Napi::CallbackInfo& info);
Napi::Value nccl_library(const Napi::CallbackInfo& info);
Napi::Value nccl_unique_id(const Napi::CallbackInfo& info);
Napi::Value nccl_connect(const Napi::CallbackInfo& info);
Napi::Value group_begin(const Napi::CallbackInfo& info);
Napi::Value group_arrive(const Napi::CallbackInfo& info);
Napi::Value group_begin_messages(const Napi::CallbackInfo& info);
Napi::Value group_places(const Napi::CallbackInfo& info);
Napi::Value group_receive_in_place(const Napi::CallbackInfo& info);

}  // namespace refit::binding
