// A std::bad_alloc with a message: which memory, and how much.
#pragma once
#include <new>
#include <string>

namespace refit {

class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

}  // namespace refit
