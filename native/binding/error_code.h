// Errors that JavaScript tells apart by `code`: NativeErrorCode in src/native/addon.ts.
#pragma once
#include <exception>
#include <string>

#include "binding/napi_setup.h"

namespace refit::binding {

// Empty where the error has none.
std::string error_code(const std::exception& error);
// An Error with the message and, where it is not empty, the code.
Napi::Error coded_error(Napi::Env env, const std::string& message, const std::string& code);

// fn(), whose C++ errors that have a code are thrown as such.
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
