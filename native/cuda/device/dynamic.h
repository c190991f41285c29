// Shared libraries that are used where they are found: cuBLASLt and NCCL come with the system, with the CUDA toolkit,
// or with somebody's torch.
#pragma once
#include <string>
#include <vector>

namespace refit::cuda {

struct Library {
  void* handle = nullptr;  // null: not found, and `tried` says where it was looked for
  std::string path;        // where the loader got it from
  std::string tried;       // one line a place: the path, and what the loader said
};

// The first of `names` (best first: "libcublasLt.so.13", "libcublasLt.so.12") that opens. Places, in order: the file
// that the environment variable `env_file` names (may be null; nothing else is tried then), the folders of
// $REFIT_CUDA_LIBS (separated by colons), the loader's own path, /usr/local/cuda*/lib64, and nvidia/*/lib of the
// site-packages of $VIRTUAL_ENV, $CONDA_PREFIX, the python3 on PATH, /opt/*/.venv and /usr/lib/python3*. Opened once:
// the library stays for the life of the process.
Library open_library(const std::vector<std::string>& names, const char* env_file);

// This file and no other.
Library open_library_file(const std::string& file);

// Null where the library has no such symbol.
void* symbol(const Library& library, const char* name);
// Where the loader has the library from: open_library may have opened it by a name without a folder. `any_symbol`: one
// of the library's.
std::string loaded_path(const Library& library, void* any_symbol);

// A library that is wanted, for `refit devices` and the log; `version` is empty where it does not tell.
struct LibraryVersion {
  std::string name, path, version, tried;
};
// (For NCCL: cuda/nccl_api.h.)
LibraryVersion find_cublas_lt();

// Folders that open_library looks into after the environment and the loader's path, those that exist. For tests.
std::vector<std::string> library_folders();

}  // namespace refit::cuda
