// Errors that JavaScript distinguishes by `code`: NativeErrorCode in src/native/addon.ts, GroupErrorCode in groups.ts.
#pragma once
#include <exception>
#include <string>

#include "binding/napi_setup.h"

namespace refit::binding {

// Empty if the error has no code.
std::string error_code(const std::exception& error);
// An Error with the message and the code, unless the code is empty.
Napi::Error coded_error(Napi::Env env, const std::string& message, const std::string& code);

// Runs fn() and throws its C++ errors that have a code as coded JavaScript errors.
template <typename F>
auto with_error_code(Napi::Env env, F&& fn) {
  try {
    return fn();
  } catch (const Napi::Error&) {
    throw;
  } catch (const std::exception& e) {
    const std::string code = error_code(e);
    if (code.empty()) throw;
    throw coded_error(env, e.what(), code);
  }
}

}  // namespace refit::binding
