#include "binding/handles.h"

#include <string>
#include <variant>
#include <vector>

#include "binding/fields.h"
#include "codec/handle_list.h"

namespace refit::binding {
namespace {

Napi::Value latin1(Napi::Env env, const std::string& text) {
  napi_value value = nullptr;
  if (napi_create_string_latin1(env, text.data(), text.size(), &value) != napi_ok) throw Napi::Error::New(env);
  return {env, value};
}

// Concatenated byte strings, and the end of each.
struct Joined {
  std::vector<uint8_t> bytes;
  std::vector<int32_t> ends;

  void add(const std::string& text) { bytes.insert(bytes.end(), text.begin(), text.end()); }
  void end() { ends.push_back(static_cast<int32_t>(bytes.size())); }
};

Napi::Object list_object(Napi::Env env, const HandleList& list) {
  Napi::Object out = Napi::Object::New(env);
  out.Set("names", latin1(env, list.names));
  out.Set("nameEnds", from_vector(env, list.name_ends));
  out.Set("dtypes", from_vector(env, list.dtypes));
  out.Set("dims", from_vector(env, list.dims));
  out.Set("sizes", from_vector(env, list.sizes));
  out.Set("sources", from_vector(env, list.segments));
  out.Set("offsets", from_vector(env, list.offsets));
  out.Set("ends", from_vector(env, list.ends));

  Napi::Array devices = Napi::Array::New(env, list.devices.size());
  for (uint32_t i = 0; i < list.devices.size(); i++) {
    const SenderDevice& device = list.devices[i];
    if (const auto* const number = std::get_if<int64_t>(&device)) {
      devices.Set(i, static_cast<double>(*number));
    } else {
      devices.Set(i, latin1(env, std::get<std::string>(device)));
    }
  }
  out.Set("devices", devices);

  Joined handles, events;
  std::vector<int32_t> device_of;
  std::vector<double> reach;
  for (const HandleSegment& segment : list.segment_list) {
    device_of.push_back(static_cast<int32_t>(segment.device));
    reach.push_back(static_cast<double>(segment.end));
    handles.add(segment.handle);
    handles.end();
    for (const std::string& event : segment.events) events.add(event);
    events.end();
  }
  out.Set("deviceOf", from_vector(env, device_of));
  out.Set("reach", from_vector(env, reach));
  out.Set("handles", from_vector(env, handles.bytes));
  out.Set("handleEnds", from_vector(env, handles.ends));
  out.Set("events", from_vector(env, events.bytes));
  out.Set("eventEnds", from_vector(env, events.ends));

  Napi::Array counters = Napi::Array::New(env, list.counters.size());
  for (uint32_t i = 0; i < list.counters.size(); i++) {
    Napi::Object counter = Napi::Object::New(env);
    counter.Set("file", latin1(env, list.counters[i].file));
    counter.Set("slots", from_vector(env, list.counters[i].slots));
    counters.Set(i, counter);
  }
  out.Set("counters", counters);
  return out;
}

}  // namespace

Napi::Value read_handles(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Array entries = to_array(info[0], "pickles");
  if (!info[1].IsFunction()) throw Napi::TypeError::New(env, "roleOf is not a function");
  const auto role_of_name = info[1].As<Napi::Function>();
  std::vector<std::span<const uint8_t>> pickles;
  for (uint32_t i = 0; i < entries.Length(); i++) pickles.push_back(to_span<uint8_t>(entries[i], "pickles"));
  const FindRole find_role = [&](std::string_view module, std::string_view name) {
    const Napi::HandleScope scope(env);
    const Napi::Value role = role_of_name.Call({latin1(env, std::string(module)), latin1(env, std::string(name))});
    return static_cast<HandleRole>(to_integer(role, "roleOf", 0, kHandleRoles - 1));
  };
  const std::optional<HandleList> list = read_handle_list(pickles, find_role);
  if (!list) return env.Null();
  return list_object(env, *list);
}

}  // namespace refit::binding
