#include "binding/config.h"

#include "binding/fields.h"

namespace refit::binding {
namespace {

int integer(const Napi::Object& object, const std::string& path, const char* name, int64_t min, int64_t max) {
  return static_cast<int>(to_integer(object.Get(name), path + name, min, max));
}

// Reads an enum from one of a few names, which are in the order of its values.
template <class Enum, size_t N>
void read_name(const Napi::Value& value, const std::string& name, const char* const (&names)[N], Enum& out) {
  const std::string got = to_string(value, name);
  std::string expected;
  for (size_t i = 0; i < N; i++) {
    if (got == names[i]) {
      out = static_cast<Enum>(i);
      return;
    }
    expected += (i == 0 ? "\"" : i + 1 == N ? " or \"" : ", \"") + std::string(names[i]) + '"';
  }
  throw Napi::RangeError::New(value.Env(), name + ": expected " + expected + ", got \"" + got + '"');
}

// Read fields of the recipe, by type. Layout refuses values that no model can have.
void read_field(const Napi::Value& value, const std::string& name, int& out) {
  out = static_cast<int>(to_integer(value, name, 0, kMaxInt));
}
void read_field(const Napi::Value& value, const std::string& name, float& out) {
  out = static_cast<float>(to_number(value, name));
}
void read_field(const Napi::Value& value, const std::string& name, double& out) { out = to_number(value, name); }
void read_field(const Napi::Value& value, const std::string& name, bool& out) { out = to_boolean(value, name); }
template <class T>
void read_field(const Napi::Value& value, const std::string& name, std::vector<T>& out) {
  const auto values = to_span<T>(value, name);
  out.assign(values.begin(), values.end());
}
void read_field(const Napi::Value& value, const std::string& name, NormPlacement& out) {
  read_name(value, name, {"pre", "post"}, out);
}
void read_field(const Napi::Value& value, const std::string& name, QkNorm& out) {
  read_name(value, name, {"none", "head", "projection"}, out);
}
void read_field(const Napi::Value& value, const std::string& name, Activation& out) {
  read_name(value, name, {"silu", "gelu_pytorch_tanh"}, out);
}

ModelRecipe parse_recipe(const Napi::Object& object) {
  ModelRecipe recipe;
  for_each_field(recipe, [&](const char* name, auto& field) {
    read_field(object.Get(name), std::string("config.recipe.") + name, field);
  });
  return recipe;
}

DType parse_dtype(const Napi::Value& value, const std::string& path) {
  const std::string name = to_string(value, path);
  std::string expected;
  for (const Format& format : kFormats) {
    if (!format.held) continue;
    if (name == format.name) return format.dtype;
    expected += (expected.empty() ? "\"" : " or \"") + std::string(format.name) + '"';
  }
  throw Napi::RangeError::New(value.Env(), path + ": expected " + expected + ", got \"" + name + '"');
}

// Reads the fields that only CUDA has. All may be absent.
void parse_cuda(const Napi::Object& object, CoreConfig& config) {
  const std::string path = "config.";
  if (const Napi::Value gpus = object.Get("gpus"); !gpus.IsUndefined()) {
    const Napi::Array list = to_array(gpus, "config.gpus");
    for (uint32_t i = 0; i < list.Length(); i++) {
      const std::string name = "config.gpus[" + std::to_string(i) + "]";
      config.gpus.push_back(static_cast<int>(to_integer(list[i], name, 0, 1023)));
    }
  }
  if (const Napi::Value share = object.Get("shareGpus"); !share.IsUndefined()) {
    config.share_gpus = to_boolean(share, "config.shareGpus");
  }
  if (const Napi::Value seconds = object.Get("watchdogSeconds"); !seconds.IsUndefined()) {
    config.watchdog_seconds = to_number(seconds, "config.watchdogSeconds");
    if (!(config.watchdog_seconds > 0)) {
      throw Napi::RangeError::New(object.Env(),
                                  "config.watchdogSeconds: expected more than 0, got " + describe(seconds));
    }
  }
  if (const Napi::Value graphs = object.Get("graphs"); !graphs.IsUndefined()) {
    config.graphs = to_boolean(graphs, "config.graphs");
  }
  if (const Napi::Value rate = object.Get("shadowRate"); !rate.IsUndefined()) {
    config.shadow_rate = to_number(rate, "config.shadowRate");
    if (!(config.shadow_rate >= 0)) {
      throw Napi::RangeError::New(object.Env(), "config.shadowRate: expected 0 or more, got " + describe(rate));
    }
  }
  const auto limit = [&](const char* name) {
    return object.Get(name).IsUndefined() ? 0 : integer(object, path, name, 1, kMaxInt);
  };
  config.max_step_tokens = limit("maxStepTokens");
  config.max_step_sequences = limit("maxStepSequences");
  config.max_context = limit("maxContext");
}

}  // namespace

CoreConfig parse_config(const Napi::Value& value) {
  const Napi::Object object = to_object(value, "config");
  const std::string device = to_string(object.Get("device"), "config.device");
  if (device != "cpu" && device != "cuda") {
    throw Napi::RangeError::New(value.Env(), "config.device: expected \"cpu\" or \"cuda\", got \"" + device + '"');
  }
  CoreConfig config;
  config.device = device;
  config.ranks = integer(object, "config.", "ranks", 1, 1024);
  config.threads = integer(object, "config.", "threads", 1, 1024);
  config.dtype = parse_dtype(object.Get("dtype"), "config.dtype");
  if (const Napi::Value isa = object.Get("isa"); !isa.IsUndefined()) config.isa = to_string(isa, "config.isa");
  config.recipe = parse_recipe(to_object(object.Get("recipe"), "config.recipe"));
  const Napi::Array params = to_array(object.Get("params"), "config.params");
  for (uint32_t i = 0; i < params.Length(); i++) {
    const Napi::HandleScope scope(value.Env());
    const std::string path = "config.params[" + std::to_string(i) + "]";
    const Napi::Object item = to_object(params[i], path);
    Param param;
    param.name = to_string(item.Get("name"), path + ".name");
    param.rows = to_integer(item.Get("rows"), path + ".rows", 0, kMaxSafe);
    param.cols = to_integer(item.Get("cols"), path + ".cols", 0, kMaxSafe);
    param.dtype = parse_dtype(item.Get("dtype"), path + ".dtype");
    config.params.push_back(std::move(param));
  }
  config.pages = integer(object, "config.", "pages", 0, kMaxInt);
  config.page_size = integer(object, "config.", "pageSize", 1, 65536);
  if (const Napi::Value deterministic = object.Get("deterministic"); !deterministic.IsUndefined()) {
    config.deterministic = to_boolean(deterministic, "config.deterministic");
  }
  if (const Napi::Value record = object.Get("recordExperts"); !record.IsUndefined()) {
    config.record_experts = to_boolean(record, "config.recordExperts");
  }
  if (const Napi::Value adapters = object.Get("adapters"); !adapters.IsUndefined()) {
    const Napi::Object slots = to_object(adapters, "config.adapters");
    config.adapter_slots = integer(slots, "config.adapters.", "slots", 1, 1024);
    config.adapter_rank = integer(slots, "config.adapters.", "rank", 1, 4096);
  }
  if (const Napi::Value sets = object.Get("sets"); !sets.IsUndefined()) {
    config.sets = static_cast<int>(to_integer(sets, "config.sets", 1, kMostSets));
  }
  if (device == "cuda") parse_cuda(object, config);
  return config;
}

Napi::Value recipe_fields(const Napi::CallbackInfo& info) {
  Napi::Array names = Napi::Array::New(info.Env());
  ModelRecipe recipe;
  for_each_field(recipe, [&](const char* name, auto&) { names.Set(names.Length(), name); });
  return names;
}

int to_set(const Napi::Value& value, const std::string& name, const CoreConfig& config) {
  return static_cast<int>(to_integer(value, name, 0, config.sets - 1));
}

Access to_access(const Napi::Value& value, const CoreConfig& config) {
  Access access;
  if (value.IsUndefined()) return access;
  const Napi::Object object = to_object(value, "access");
  if (const Napi::Value set = object.Get("set"); !set.IsUndefined()) access.set = to_set(set, "access.set", config);
  if (const Napi::Value beside = object.Get("beside"); !beside.IsUndefined()) {
    access.beside = to_boolean(beside, "access.beside");
  }
  return access;
}

}  // namespace refit::binding
