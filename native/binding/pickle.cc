#include "binding/pickle.h"

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "binding/fields.h"
#include "codec/pickle_machine.h"
#include "codec/pickle_tree.h"

namespace refit::binding {
namespace {

Napi::Value utf8(Napi::Env env, std::string_view text) { return Napi::String::New(env, text.data(), text.size()); }

// Reads the limits that the caller sets below the defaults.
PickleLimits parse_limits(const Napi::Value& value) {
  PickleLimits limits;
  if (value.IsUndefined()) return limits;
  const Napi::Object fields = to_object(value, "limits");
  const auto lower = [&](const char* name, size_t& limit) {
    const Napi::Value given = fields.Get(name);
    if (given.IsUndefined()) return;
    limit = static_cast<size_t>(to_integer(given, name, 0, static_cast<int64_t>(limit)));
  };
  lower("bytes", limits.bytes);
  lower("memo", limits.memo);
  lower("objects", limits.objects);
  lower("items", limits.items);
  lower("stack", limits.stack);
  lower("depth", limits.depth);
  lower("text", limits.text);
  lower("names", limits.names);
  return limits;
}

// JavaScript's answer for a name: the number of a use, or text with the reason for a refusal.
PickleMeaning to_meaning(const Napi::Value& value) {
  if (value.IsString()) return {false, {}, 0, value.As<Napi::String>().Utf8Value()};
  return {true, static_cast<PickleUse>(to_integer(value, "findName", 0, kPickleUses - 1))};
}

Napi::Value pairs_of_ints(Napi::Env env, const std::vector<PickleValue>& values) {
  auto array = Napi::Int32Array::New(env, 2 * values.size());
  if (!values.empty()) std::memcpy(array.Data(), values.data(), 8 * values.size());
  return array;
}

Napi::Object tree_object(Napi::Env env, PickleTree tree) {
  tree.values.push_back(tree.root);
  Napi::Object out = Napi::Object::New(env);
  out.Set("objects", from_vector(env, tree.objects));
  out.Set("values", pairs_of_ints(env, tree.values));
  out.Set("encoded", from_vector(env, tree.encoded));
  return out;
}

Napi::Object error_object(Napi::Env env, const PickleError& error) {
  Napi::Object out = Napi::Object::New(env);
  out.Set("kind", static_cast<double>(error.kind));
  out.Set("at", static_cast<double>(error.at));
  out.Set("message", utf8(env, error.message));
  return out;
}

}  // namespace

Napi::Value read_pickle(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::span<const uint8_t> pickle = to_span<uint8_t>(info[0], "pickle");
  if (!info[1].IsFunction()) throw Napi::TypeError::New(env, "findName is not a function");
  const auto callback = info[1].As<Napi::Function>();
  const FindName find_name = [&](std::string_view module, std::string_view name) {
    const Napi::HandleScope scope(env);
    return to_meaning(callback.Call({utf8(env, module), utf8(env, name)}));
  };
  PickleTree tree;
  try {
    PickleMachine machine(pickle, find_name, parse_limits(info[2]));
    machine.run();
    tree = to_tree(machine);
  } catch (const PickleError& error) {
    return error_object(env, error);
  }
  return tree_object(env, std::move(tree));
}

}  // namespace refit::binding
