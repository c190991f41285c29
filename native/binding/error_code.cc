#include "binding/error_code.h"

#include <new>

#include "core/device.h"

namespace refit::binding {

std::string error_code(const std::exception& error) {
  if (dynamic_cast<const DeviceLost*>(&error) != nullptr) return "DEVICE_LOST";
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "NO_MEMORY";
  return "";
}

Napi::Error coded_error(Napi::Env env, const std::string& message, const std::string& code) {
  Napi::Error error = Napi::Error::New(env, message);
  if (!code.empty()) error.Set("code", Napi::String::New(env, code));
  return error;
}

}  // namespace refit::binding
