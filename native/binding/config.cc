#include "binding/config.h"

#include "binding/fields.h"

namespace refit::binding {
namespace {

constexpr int64_t kMaxInt = 0x7fffffff;

int integer(const Napi::Object& object, const std::string& path, const char* name, int64_t min, int64_t max) {
  return static_cast<int>(to_integer(object.Get(name), path + name, min, max));
}

Arch parse_arch(const Napi::Object& object) {
  const std::string path = "config.arch.";
  Arch arch;
  arch.hidden = integer(object, path, "hiddenSize", 1, kMaxInt);
  arch.layers = integer(object, path, "layers", 1, 65536);
  arch.heads = integer(object, path, "heads", 1, 65536);
  arch.kv_heads = integer(object, path, "kvHeads", 1, 65536);
  arch.head_dim = integer(object, path, "headDim", 1, 65536);
  arch.vocab = integer(object, path, "vocabSize", 1, kMaxInt);
  arch.rms_eps = static_cast<float>(to_number(object.Get("rmsNormEps"), path + "rmsNormEps"));
  const auto inv_freq = to_span<double>(object.Get("ropeInvFreq"), path + "ropeInvFreq");
  arch.rope_inv_freq.assign(inv_freq.begin(), inv_freq.end());
  if (static_cast<int64_t>(inv_freq.size()) * 2 != arch.head_dim) {
    throw Napi::RangeError::New(object.Env(),
                                path + "ropeInvFreq: expected headDim / 2 = " + std::to_string(arch.head_dim / 2) +
                                    " entries, got " + std::to_string(inv_freq.size()));
  }
  arch.rope_scale = to_number(object.Get("ropeScale"), path + "ropeScale");
  const auto sparse = to_span<uint8_t>(object.Get("sparseLayers"), path + "sparseLayers");
  arch.sparse_layers.assign(sparse.begin(), sparse.end());
  if (static_cast<int64_t>(sparse.size()) != arch.layers) {
    throw Napi::RangeError::New(object.Env(), path + "sparseLayers: expected one entry per layer (" +
                                                  std::to_string(arch.layers) + "), got " +
                                                  std::to_string(sparse.size()));
  }
  arch.experts = integer(object, path, "experts", 0, 65536);
  arch.experts_per_token = integer(object, path, "expertsPerToken", 0, 65536);
  arch.norm_topk_prob = to_boolean(object.Get("normTopkProb"), path + "normTopkProb");
  return arch;
}

DType parse_dtype(const Napi::Value& value) {
  const std::string name = to_string(value, "config.dtype");
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float32") return DType::kFloat32;
  throw Napi::RangeError::New(value.Env(), "config.dtype: expected \"bfloat16\" or \"float32\", got \"" + name + '"');
}

// The fields that CUDA alone has. All may be absent.
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
  config.dtype = parse_dtype(object.Get("dtype"));
  if (const Napi::Value isa = object.Get("isa"); !isa.IsUndefined()) config.isa = to_string(isa, "config.isa");
  config.arch = parse_arch(to_object(object.Get("arch"), "config.arch"));
  const Napi::Array params = to_array(object.Get("params"), "config.params");
  for (uint32_t i = 0; i < params.Length(); i++) {
    const Napi::HandleScope scope(value.Env());
    const std::string path = "config.params[" + std::to_string(i) + "]";
    const Napi::Object item = to_object(params[i], path);
    Param param;
    param.name = to_string(item.Get("name"), path + ".name");
    param.rows = to_integer(item.Get("rows"), path + ".rows", 0, kMaxSafe);
    param.cols = to_integer(item.Get("cols"), path + ".cols", 0, kMaxSafe);
    config.params.push_back(std::move(param));
  }
  config.pages = integer(object, "config.", "pages", 0, kMaxInt);
  config.page_size = integer(object, "config.", "pageSize", 1, 65536);
  if (const Napi::Value record = object.Get("recordExperts"); !record.IsUndefined()) {
    config.record_experts = to_boolean(record, "config.recordExperts");
  }
  if (device == "cuda") parse_cuda(object, config);
  return config;
}

}  // namespace refit::binding
