#include "binding/fields.h"

#include <cmath>

namespace refit::binding {
namespace {

[[noreturn]] void wrong_type(const Napi::Value& value, const std::string& name, const char* expected) {
  throw Napi::TypeError::New(value.Env(), name + ": expected " + expected + ", got " + describe(value));
}

size_t element_size(napi_typedarray_type type) {
  switch (type) {
    case napi_uint8_array:
      return 1;
    case napi_int32_array:
    case napi_float32_array:
      return 4;
    default:
      return 8;
  }
}

}  // namespace

std::string describe(const Napi::Value& value) {
  if (value.IsString()) {
    const std::string text = value.As<Napi::String>();
    return '"' + (text.size() > 40 ? text.substr(0, 40) + "..." : text) + '"';
  }
  if (value.IsSymbol()) return "a symbol";
  if (value.IsFunction()) return "a function";
  if (value.IsObject()) {
    // Not ToString, which would run code of the caller's object.
    if (value.IsArray()) return "an array";
    if (value.IsTypedArray()) return "a typed array of another type";
    return "an object";
  }
  return value.ToString();
}

int64_t to_integer(const Napi::Value& value, const std::string& name, int64_t min, int64_t max) {
  if (!value.IsNumber()) wrong_type(value, name, "an integer");
  const double number = value.As<Napi::Number>().DoubleValue();
  if (!(number == std::floor(number)) || number < static_cast<double>(min) || number > static_cast<double>(max)) {
    throw Napi::RangeError::New(value.Env(), name + ": expected an integer from " + std::to_string(min) + " to " +
                                                 std::to_string(max) + ", got " + describe(value));
  }
  return static_cast<int64_t>(number);
}

double to_number(const Napi::Value& value, const std::string& name) {
  if (!value.IsNumber()) wrong_type(value, name, "a number");
  const double number = value.As<Napi::Number>().DoubleValue();
  if (!std::isfinite(number)) {
    throw Napi::RangeError::New(value.Env(), name + ": expected a finite number, got " + describe(value));
  }
  return number;
}

bool to_boolean(const Napi::Value& value, const std::string& name) {
  if (!value.IsBoolean()) wrong_type(value, name, "a boolean");
  return value.As<Napi::Boolean>();
}

std::string to_string(const Napi::Value& value, const std::string& name) {
  if (!value.IsString()) wrong_type(value, name, "a string");
  return value.As<Napi::String>();
}

Napi::Object to_object(const Napi::Value& value, const std::string& name) {
  if (!value.IsObject() || value.IsArray() || value.IsFunction()) wrong_type(value, name, "an object");
  return value.As<Napi::Object>();
}

Napi::Array to_array(const Napi::Value& value, const std::string& name) {
  if (!value.IsArray()) wrong_type(value, name, "an array");
  return value.As<Napi::Array>();
}

std::span<const uint8_t> typed_array_bytes(const Napi::Value& value, const std::string& name, napi_typedarray_type type,
                                           const char* type_name) {
  if (!value.IsTypedArray()) wrong_type(value, name, type_name);
  napi_typedarray_type actual;
  size_t length = 0;
  void* data = nullptr;
  const napi_status status = napi_get_typedarray_info(value.Env(), value, &actual, &length, &data, nullptr, nullptr);
  if (status != napi_ok) throw Napi::Error::New(value.Env());
  if (actual != type) wrong_type(value, name, type_name);
  return {static_cast<const uint8_t*>(data), length * element_size(type)};
}

}  // namespace refit::binding
