// Shared libraries that are opened wherever they are found: cuBLASLt and NCCL come with the system, with the CUDA
// toolkit or with an installed torch.
#pragma once
#include <string>
#include <vector>

namespace refit::cuda {

struct Library {
  void* handle = nullptr;  // null: not found, and `tried` lists the places
  std::string path;        // the file that the loader opened
  std::string tried;       // one line for each place: the path and the loader's message
};

// Opens the first of `names` (best first: "libcublasLt.so.13", "libcublasLt.so.12") that can be opened. Places, in
// order: the file that the environment variable `env_file` names (may be null; if it is set, nothing else is tried),
// the folders of $REFIT_CUDA_LIBS (separated by colons), the loader's own path, /usr/local/cuda*/lib64, and
// nvidia/*/lib of the site-packages of $VIRTUAL_ENV, $CONDA_PREFIX, the python3 on PATH, /opt/*/.venv and
// /usr/lib/python3*. A library is opened once and stays for the life of the process.
Library open_library(const std::vector<std::string>& names, const char* env_file);

// Opens this file only.
Library open_library_file(const std::string& file);

// Null if the library has no such symbol.
void* symbol(const Library& library, const char* name);
// The file that the loader opened; open_library may have opened the library by a bare name. `any_symbol`: a symbol
// of the library.
std::string loaded_path(const Library& library, void* any_symbol);

// A library's version for `refit devices` and the log; `version` is empty if the library does not report one.
struct LibraryVersion {
  std::string name, path, version, tried;
};
// NCCL has its own function in cuda/group/nccl_api.h.
LibraryVersion find_cublas_lt();

// The existing folders that open_library looks into after the environment and the loader's path. For tests.
std::vector<std::string> library_folders();

}  // namespace refit::cuda
