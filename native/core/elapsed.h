// Elapsed time, for deadlines and for messages.
#pragma once
#include <chrono>
#include <cstdio>
#include <string>

namespace refit {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// With three significant digits: "0.00123", "12.3".
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", seconds);
  return text;
}

}  // namespace refit
