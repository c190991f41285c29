// Reads arguments and fields of JavaScript objects. A wrong value throws a TypeError or RangeError that names the
// field, what was expected and what was given.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "binding/napi_setup.h"

namespace refit::binding {

// 2^53 - 1: the largest integer that a JavaScript number holds exactly.
constexpr int64_t kMaxSafe = (int64_t{1} << 53) - 1;
constexpr int64_t kMaxInt = 0x7fffffff;

// For messages: `"text"`, `12.5`, `undefined`, `[object Array]`.
std::string describe(const Napi::Value& value);

int64_t to_integer(const Napi::Value& value, const std::string& name, int64_t min, int64_t max);
double to_number(const Napi::Value& value, const std::string& name);
bool to_boolean(const Napi::Value& value, const std::string& name);
std::string to_string(const Napi::Value& value, const std::string& name);
Napi::Object to_object(const Napi::Value& value, const std::string& name);
Napi::Array to_array(const Napi::Value& value, const std::string& name);

template <typename T>
struct TypedArrayOf;
template <>
struct TypedArrayOf<uint8_t> {
  static constexpr napi_typedarray_type kType = napi_uint8_array;
  static constexpr const char* kName = "Uint8Array";
};
template <>
struct TypedArrayOf<uint16_t> {
  static constexpr napi_typedarray_type kType = napi_uint16_array;
  static constexpr const char* kName = "Uint16Array";
};
template <>
struct TypedArrayOf<uint32_t> {
  static constexpr napi_typedarray_type kType = napi_uint32_array;
  static constexpr const char* kName = "Uint32Array";
};
template <>
struct TypedArrayOf<int32_t> {
  static constexpr napi_typedarray_type kType = napi_int32_array;
  static constexpr const char* kName = "Int32Array";
};
template <>
struct TypedArrayOf<float> {
  static constexpr napi_typedarray_type kType = napi_float32_array;
  static constexpr const char* kName = "Float32Array";
};
template <>
struct TypedArrayOf<double> {
  static constexpr napi_typedarray_type kType = napi_float64_array;
  static constexpr const char* kName = "Float64Array";
};
template <>
struct TypedArrayOf<uint64_t> {
  static constexpr napi_typedarray_type kType = napi_biguint64_array;
  static constexpr const char* kName = "BigUint64Array";
};

// The elements in place: valid until control returns to JavaScript, or while a reference holds the array.
std::span<const uint8_t> typed_array_bytes(const Napi::Value& value, const std::string& name, napi_typedarray_type type,
                                           const char* type_name);

template <typename T>
std::span<const T> to_span(const Napi::Value& value, const std::string& name) {
  const std::span<const uint8_t> bytes = typed_array_bytes(value, name, TypedArrayOf<T>::kType, TypedArrayOf<T>::kName);
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

// A fresh typed array with a copy of the values.
template <typename T>
Napi::Value from_vector(Napi::Env env, const std::vector<T>& values) {
  auto array = Napi::TypedArrayOf<T>::New(env, values.size(), TypedArrayOf<T>::kType);
  if (!values.empty()) std::copy(values.begin(), values.end(), array.Data());
  return array;
}

}  // namespace refit::binding
