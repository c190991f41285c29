#include "cuda/device/dynamic.h"

#include <dlfcn.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <map>
#include <mutex>

namespace refit::cuda {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  size_t from = 0;
  while (from <= list.size()) {
    const size_t end = std::min(list.find(':', from), list.size());
    if (end > from) parts.push_back(list.substr(from, end - from));
    from = end + 1;
  }
  return parts;
}

// The folders that match, newest version first. /usr/local/cuda is often a link to one of the others.
void add_matches(std::vector<std::string>& out, const std::string& pattern) {
  glob_t found{};
  if (glob(pattern.c_str(), GLOB_ONLYDIR, nullptr, &found) == 0) {
    for (size_t i = found.gl_pathc; i-- > 0;) {
      char resolved[PATH_MAX];
      if (realpath(found.gl_pathv[i], resolved) == nullptr) continue;
      if (std::find(out.begin(), out.end(), resolved) == out.end()) out.emplace_back(resolved);
    }
  }
  globfree(&found);
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Folders of an environment's nvidia packages; `prefix` is the folder that contains bin and lib.
void add_environment(std::vector<std::string>& out, const std::string& prefix) {
  for (const char* lib : {"lib", "lib64"}) {
    for (const char* packages : {"site-packages", "dist-packages"}) {
      add_matches(out, prefix + "/" + lib + "/python3*/" + packages + "/nvidia/*/lib");
    }
  }
}

// The prefixes that the python3 on PATH belongs to: by its name (a virtual environment) and by its resolved link.
std::vector<std::string> python_prefixes() {
  for (const std::string& folder : split(variable("PATH"))) {
    const std::string file = folder + "/python3";
    if (access(file.c_str(), X_OK) != 0) continue;
    std::vector<std::string> prefixes{folder_of(folder)};
    char resolved[PATH_MAX];
    if (realpath(file.c_str(), resolved) != nullptr) prefixes.push_back(folder_of(folder_of(resolved)));
    return prefixes;
  }
  return {};
}

class Search {
 public:
  explicit Search(const std::vector<std::string>& names) : names_(names) {}

  bool open(const std::string& file) {
    void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* const error = dlerror();
      const std::string why = error == nullptr ? "cannot be opened" : error;
      // For most faults the loader's message begins with the file name.
      library.tried += (library.tried.empty() ? "" : "\n") + (why.rfind(file, 0) == 0 ? why : file + ": " + why);
      return false;
    }
    library.handle = handle;
    library.path = file;
    return true;
  }
  bool open_in(const std::string& folder) {
    return std::any_of(names_.begin(), names_.end(),
                       [&](const std::string& name) { return open(folder + "/" + name); });
  }
  bool open_by_name() {
    return std::any_of(names_.begin(), names_.end(), [&](const std::string& name) { return open(name); });
  }

  Library library;

 private:
  const std::vector<std::string>& names_;
};

Library search(const std::vector<std::string>& names, const char* env_file) {
  Search found(names);
  if (const std::string file = env_file == nullptr ? "" : variable(env_file); !file.empty()) {
    found.open(file);
    return found.library;
  }
  for (const std::string& folder : split(variable("REFIT_CUDA_LIBS"))) {
    if (found.open_in(folder)) return found.library;
  }
  if (found.open_by_name()) return found.library;
  for (const std::string& folder : library_folders()) {
    if (found.open_in(folder)) return found.library;
  }
  return found.library;
}

}  // namespace

std::vector<std::string> library_folders() {
  std::vector<std::string> folders;
  add_matches(folders, "/usr/local/cuda*/lib64");
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const std::string prefix = variable(name); !prefix.empty()) add_environment(folders, prefix);
  }
  for (const std::string& prefix : python_prefixes()) add_environment(folders, prefix);
  add_matches(folders, "/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib");
  for (const char* packages : {"site-packages", "dist-packages"}) {
    add_matches(folders, std::string("/usr/lib/python3*/") + packages + "/nvidia/*/lib");
    add_matches(folders, std::string("/usr/local/lib/python3*/") + packages + "/nvidia/*/lib");
  }
  return folders;
}

Library open_library(const std::vector<std::string>& names, const char* env_file) {
  static std::mutex mutex;
  static std::map<std::string, Library> opened;
  const std::lock_guard lock(mutex);
  std::string key;
  for (const std::string& name : names) key += name + ":";
  const auto it = opened.find(key);
  if (it != opened.end()) return it->second;
  Library library = search(names, env_file);
  // a missing library is not remembered: it may be installed later
  if (library.handle != nullptr) opened.emplace(key, library);
  return library;
}

Library open_library_file(const std::string& file) {
  const std::vector<std::string> names;
  Search found(names);
  found.open(file);
  return found.library;
}

void* symbol(const Library& library, const char* name) {
  return library.handle == nullptr ? nullptr : dlsym(library.handle, name);
}

std::string loaded_path(const Library& library, void* any_symbol) {
  Dl_info info;
  if (any_symbol == nullptr || dladdr(any_symbol, &info) == 0 || info.dli_fname == nullptr) return library.path;
  return info.dli_fname;
}

LibraryVersion find_cublas_lt() {
  const Library library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, nullptr);
  LibraryVersion out{"cuBLASLt", library.path, "", library.handle == nullptr ? library.tried : ""};
  void* const function = symbol(library, "cublasLtGetVersion");
  if (function == nullptr) return out;
  out.path = loaded_path(library, function);
  // The number 130100 means 13.1.0.
  const size_t version = reinterpret_cast<size_t (*)()>(function)();
  out.version =
      std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  return out;
}

}  // namespace refit::cuda
