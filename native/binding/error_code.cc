#include "binding/error_code.h"

#include <new>

#include "core/device.h"
#include "core/group.h"

namespace refit::binding {

std::string error_code(const std::exception& error) {
  if (dynamic_cast<const DeviceLost*>(&error) != nullptr) return "DEVICE_LOST";
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "NO_MEMORY";
  if (const auto* group = dynamic_cast<const GroupError*>(&error)) {
    switch (group->kind) {
      case GroupErrorKind::kTimeout:
        return "GROUP_TIMEOUT";
      case GroupErrorKind::kBroken:
        return "GROUP_BROKEN";
      case GroupErrorKind::kRefused:
        return "GROUP_REFUSED";
      case GroupErrorKind::kSharedGpu:
        return "GROUP_SHARED_GPU";
      case GroupErrorKind::kNcclVersion:
        return "GROUP_NCCL_VERSION";
    }
  }
  return "";
}

Napi::Error coded_error(Napi::Env env, const std::string& message, const std::string& code) {
  Napi::Error error = Napi::Error::New(env, message);
  if (!code.empty()) error.Set("code", Napi::String::New(env, code));
  return error;
}

}  // namespace refit::binding
