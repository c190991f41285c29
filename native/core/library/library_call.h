// Errors and results of calls of a shared library with its own device: see core/library/device_library.h.
#pragma once
#include <cstdint>
#include <exception>
#include <stdexcept>

#include "core/device.h"
#include "core/group.h"
#include "core/memory_error.h"

namespace refit {

enum class FailureKind : int32_t {
  kNone = 0,
  kInvalidArgument,
  kNoMemory,
  kDeviceLost,
  kGroupTimeout,
  kGroupBroken,
  kGroupRefused,
  kGroupSharedGpu,
  kGroupNcclVersion,
  kOther
};

struct Failure {
  FailureKind kind = FailureKind::kNone;
  char message[8192] = {};  // zero-terminated; cut if it is longer
};

// Takes a result that the library owns; must not throw.
template <typename T>
struct Sink {
  void (*take)(void* context, const T& value) noexcept;
  void* context;
};

// --- the addon's side

// Throws the failure that the library has reported.
inline void raise(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kNone:
      return;
    case FailureKind::kInvalidArgument:
      throw std::invalid_argument(failure.message);
    case FailureKind::kNoMemory:
      throw NoMemory(failure.message);
    case FailureKind::kDeviceLost:
      throw DeviceLost(failure.message);
    case FailureKind::kGroupTimeout:
      throw GroupError(GroupErrorKind::kTimeout, failure.message);
    case FailureKind::kGroupBroken:
      throw GroupError(GroupErrorKind::kBroken, failure.message);
    case FailureKind::kGroupRefused:
      throw GroupError(GroupErrorKind::kRefused, failure.message);
    case FailureKind::kGroupSharedGpu:
      throw GroupError(GroupErrorKind::kSharedGpu, failure.message);
    case FailureKind::kGroupNcclVersion:
      throw GroupError(GroupErrorKind::kNcclVersion, failure.message);
    case FailureKind::kOther:
      break;
  }
  throw std::runtime_error(failure.message);
}

// A copy of the result that a sink received. An exception of the copy is kept here until the library has returned.
template <typename T>
class Taken {
 public:
  explicit Taken(T& out) : out_(out) {}
  Sink<T> sink() {
    return {[](void* self, const T& value) noexcept { static_cast<Taken*>(self)->take(value); }, this};
  }
  void finish(const Failure& failure) {
    if (error_) std::rethrow_exception(error_);
    raise(failure);
  }

 private:
  void take(const T& value) noexcept {
    try {
      out_ = value;
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  T& out_;
  std::exception_ptr error_;
};

}  // namespace refit
