#include "binding/fault_control.h"

#include "binding/fields.h"
#include "core/fault.h"
#include "core/library/cuda_library.h"

namespace refit::binding {

#ifdef REFIT_FAULTS
namespace {

template <typename T>
T choose(const Napi::Object& fault, const char* name, std::initializer_list<std::pair<const char*, T>> choices) {
  const std::string text = to_string(fault.Get(name), std::string("fault.") + name);
  std::string known;
  for (const auto& [spelling, value] : choices) {
    if (text == spelling) return value;
    known += (known.empty() ? "" : ", ") + std::string(spelling);
  }
  throw Napi::RangeError::New(fault.Env(),
                              std::string("fault.") + name + ": expected one of " + known + ", got \"" + text + '"');
}

void arm_fault(const Napi::CallbackInfo& info) {
  using fault::Action;
  using fault::Point;
  if (info[0].IsNull()) {
    fault::disarm();
    arm_cuda_library({}, 0, {}, 0);
    return;
  }
  const Napi::Object object = to_object(info[0], "fault");
  const auto point = choose<Point>(object, "point",
                                   {{"read", Point::kRead},
                                    {"copy", Point::kCopy},
                                    {"alloc", Point::kAlloc},
                                    {"step", Point::kStep},
                                    {"open", Point::kIpcOpen},
                                    {"event", Point::kIpcEvent},
                                    {"close", Point::kIpcClose},
                                    {"end", Point::kEnd},
                                    {"begin", Point::kBegin},
                                    {"result", Point::kResult}});
  const auto action = choose<Action>(
      object, "action",
      {{"fail", Action::kFail}, {"stall", Action::kStall}, {"slow", Action::kSlow}, {"die", Action::kDie}});
  const int64_t at = to_integer(object.Get("at"), "fault.at", 1, kMaxSafe);
  const bool stalls = action == Action::kStall || action == Action::kSlow;
  const int stall_ms = stalls ? static_cast<int>(to_integer(object.Get("stallMs"), "fault.stallMs", 0, 600000)) : 0;
  fault::arm(point, at, action, stall_ms);
  arm_cuda_library(point, at, action, stall_ms);
}

Napi::Value fault_pending(const Napi::CallbackInfo& info) { return Napi::Boolean::New(info.Env(), fault::pending()); }

}  // namespace

void export_faults(Napi::Env env, Napi::Object exports) {
  exports.Set("armFault", Napi::Function::New(env, arm_fault, "armFault"));
  exports.Set("faultPending", Napi::Function::New(env, fault_pending, "faultPending"));
}
#else
void export_faults(Napi::Env, Napi::Object) {}
#endif

}  // namespace refit::binding
