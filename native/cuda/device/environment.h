// Switches in the environment.
#pragma once
#include <cstdlib>
#include <cstring>

namespace refit::cuda {

// Whether the variable is set, and neither empty nor "0".
inline bool switched_on(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != 0 && std::strcmp(value, "0") != 0;
}

}  // namespace refit::cuda
