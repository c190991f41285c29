#include "codec/zstd_stream.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace refit {
namespace {

// The types of zstd.h, unchanged since 1.0.
struct InBuffer {
  const void* data;
  size_t size, at;
};
struct OutBuffer {
  void* data;
  size_t size, at;
};

struct Library {
  void* (*create)() = nullptr;
  size_t (*free)(void*) = nullptr;
  size_t (*init)(void*) = nullptr;
  size_t (*decompress)(void*, OutBuffer*, InBuffer*) = nullptr;
  unsigned (*is_error)(size_t) = nullptr;
  const char* (*error_name)(size_t) = nullptr;
  std::string missing;

  Library() {
    void* const handle = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      missing = "libzstd.so.1 is not there (Debian and Ubuntu: apt-get install libzstd1)";
      return;
    }
    find(handle, "ZSTD_createDStream", create);
    find(handle, "ZSTD_freeDStream", free);
    find(handle, "ZSTD_initDStream", init);
    find(handle, "ZSTD_decompressStream", decompress);
    find(handle, "ZSTD_isError", is_error);
    find(handle, "ZSTD_getErrorName", error_name);
  }

  template <typename F>
  void find(void* handle, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr) missing = std::string("libzstd.so.1 has no ") + name;
  }
};

const Library& library() {
  static const Library loaded;
  if (!loaded.missing.empty()) throw std::runtime_error(loaded.missing);
  return loaded;
}

}  // namespace

ZstdStream::ZstdStream(const uint8_t* data, size_t size) : stream_(library().create()), data_(data), size_(size) {
  if (stream_ == nullptr || library().is_error(library().init(stream_)) != 0) {
    library().free(stream_);
    throw std::runtime_error("there is no memory to decompress in");
  }
}

ZstdStream::~ZstdStream() { library().free(stream_); }

size_t ZstdStream::read(uint8_t* out, size_t size) {
  OutBuffer to{out, size, 0};
  while (to.at < size) {
    InBuffer from{data_, size_, at_};
    const size_t before = to.at;
    const size_t result = library().decompress(stream_, &to, &from);
    if (library().is_error(result) != 0)
      throw std::runtime_error(std::string("it does not decompress: ") + library().error_name(result));
    const bool stuck = from.at == at_ && to.at == before;
    at_ = from.at;
    // Stops at the end of the last frame, or where the input is cut off inside a frame.
    if (stuck || (at_ == size_ && result == 0)) break;
  }
  return to.at;
}

}  // namespace refit
