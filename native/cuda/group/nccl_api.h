// The part of NCCL's C interface that is used: names, numbers and layouts follow its public header nccl.h (2.14 to
// 2.30). The declarations are our own, so a build needs neither NCCL nor a header of CUDA.
#pragma once
#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/device/dynamic.h"

struct CUstream_st;  // a cudaStream_t is a pointer to it
struct ncclComm;

namespace refit::cuda {

using NcclStream = CUstream_st*;

// ncclResult_t; newer libraries may return other values.
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,  // from communicators that do not block
};

// ncclDataType_t. Broadcasts and gathers only move bytes: any type works if the total size is the same, whatever type
// the other ranks use.
enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclUint32 = 3,
  kNcclInt64 = 4,
  kNcclUint64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

// ncclRedOp_t
enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

// The ranks' shared secret before the communicator exists: rank 0 creates it and sends it to the others. Opaque.
struct NcclUniqueId {
  char bytes[128];
};
static_assert(sizeof(NcclUniqueId) == 128);

// ncclConfig_t as in 2.18; later versions only append fields and read as many as `size` says. INT_MIN and null mean
// that the library chooses.
struct NcclConfig {
  size_t size;  // of the fields that are set
  uint32_t magic;
  uint32_t version;  // of the layout: 21800 means 2.18.0
  int32_t blocking;
  int32_t cga_cluster_size, min_ctas, max_ctas;  // since 2.17
  const char* net_name;                          // since 2.17
  int32_t split_share;                           // since 2.18
  int32_t traffic_class;                         // since 2.25; padding in older versions
};
static_assert(sizeof(NcclConfig) == 48);
static_assert(offsetof(NcclConfig, magic) == 8 && offsetof(NcclConfig, version) == 12);
static_assert(offsetof(NcclConfig, blocking) == 16 && offsetof(NcclConfig, cga_cluster_size) == 20);
static_assert(offsetof(NcclConfig, min_ctas) == 24 && offsetof(NcclConfig, max_ctas) == 28);
static_assert(offsetof(NcclConfig, net_name) == 32 && offsetof(NcclConfig, split_share) == 40);
static_assert(offsetof(NcclConfig, traffic_class) == 44);

// A configuration for this version of the library: calls do not block, and the library chooses everything else.
NcclConfig nccl_config(int library_version);

// An open library. The functions return an NcclResult; pointers are to memory of the current GPU.
struct NcclApi {
  std::string path;  // the file that the loader opened
  int version = 0;   // 22809 means 2.28.9

  int (*get_unique_id)(NcclUniqueId* id);
  int (*init_rank_config)(ncclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  int (*finalize)(ncclComm* comm);
  int (*abort)(ncclComm* comm);
  int (*get_async_error)(ncclComm* comm, int* result);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(ncclComm* comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int peer, ncclComm* comm, NcclStream stream);
  int (*recv)(void* data, size_t count, int type, int peer, ncclComm* comm, NcclStream stream);
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, ncclComm* comm, NcclStream stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, ncclComm* comm, NcclStream stream);
  // `count`: elements that each rank sends
  int (*all_gather)(const void* from, void* to, size_t count, int type, ncclComm* comm, NcclStream stream);

  // "NCCL 2.28.9"
  std::string name() const;
};

// "2.28.9" from 22809; since 2.9 a version has five digits, before it had four.
std::string nccl_version(int number);

// The library in `file`, or the one that open_library finds ($REFIT_NCCL names a file). It stays for the life of the
// process. The first call sets NCCL_NVLS_ENABLE=0 unless it is set. Any thread. Throws std::runtime_error with the
// reason: not found (with all places), older than 2.14 or of another major version, a function missing.
const NcclApi& open_nccl(const std::string& file = "");

// For `refit devices`; never throws.
LibraryVersion find_nccl();

}  // namespace refit::cuda
