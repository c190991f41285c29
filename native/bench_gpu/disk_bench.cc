// A checkpoint from the page cache to a GPU, compared with its limits: pinned host to device copies, and the same
// number of threads that read the same file into pinned memory.
//   disk_bench FOLDER [--gb N] [--threads N] [--turns N] [--ranks N]
// It makes the file in FOLDER if it is missing, and leaves it there.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench_gpu/checkpoint.h"
#include "bench_gpu/timing.h"
#include "core/checksum.h"
#include "core/pool.h"
#include "cuda/device/pinned_ring.h"
#include "cuda/weights/write.h"
#include "transport/file_read.h"

using namespace refit;
using namespace refit::bench;
using namespace refit::cuda;

namespace {

constexpr uint64_t kPiece = 2 << 20;

// Like a safetensors file with a header of 4,104 bytes.
constexpr uint64_t kHeader = 4104;

void make_file(const std::string& path, uint64_t bytes, Pool& pool) {
  struct stat there;
  if (stat(path.c_str(), &there) == 0 && static_cast<uint64_t>(there.st_size) == bytes) return;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw std::runtime_error(path + ": " + strerror(errno));
  pool.parallel_for(static_cast<int64_t>((bytes + kPiece - 1) / kPiece), [&](int64_t i, int) {
    const uint64_t from = static_cast<uint64_t>(i) * kPiece;
    std::vector<uint64_t> words(kPiece / 8);
    for (size_t w = 0; w < words.size(); w++) words[w] = splitmix64_mix(from / 8 + w);
    const uint64_t count = std::min(kPiece, bytes - from);
    if (pwrite(fd, words.data(), count, static_cast<off_t>(from)) != static_cast<ssize_t>(count)) {
      throw std::runtime_error(path + ": " + strerror(errno));
    }
  });
  close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: disk_bench FOLDER [--gb N] [--threads N] [--turns N] [--ranks N]\n");
    return 2;
  }
  double gb = 16.4;
  int threads = static_cast<int>(std::thread::hardware_concurrency()), turns = 5, rank_count = 1;
  for (int i = 2; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--gb") == 0) gb = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--threads") == 0) threads = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--turns") == 0) turns = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--ranks") == 0) rank_count = std::atoi(argv[i + 1]);
  }
  try {
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    for (int c = 0; c < std::min(gpus, rank_count); c++) print_gpu(c);
    Shape shape = kQwen3_8B;
    while (static_cast<double>(Checkpoint(shape, rank_count, kHeader).bytes) > gb * 1e9 && shape.layers > 1)
      shape.layers--;
    Checkpoint checkpoint(shape, rank_count, kHeader);
    Pool pool(threads);
    const std::string path = std::string(argv[1]) + "/refit-disk-bench.bin";
    make_file(path, checkpoint.bytes, pool);
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(path + ": " + strerror(errno));
    const double bytes = static_cast<double>(checkpoint.bytes - kHeader);
    std::printf("%s, %ld layers, %zu tensors, %.2f GB, %d threads, %d rank(s)\n", path.c_str(), long(shape.layers),
                checkpoint.job.tensors.size(), bytes / 1e9, threads, rank_count);

    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<std::unique_ptr<GpuMemory>> memory;
    GpuParams params;
    params.ranks = &ranks;
    params.shapes = checkpoint.params;
    for (int r = 0; r < rank_count; r++) {
      ranks.push_back(std::make_unique<Rank>(r, r % gpus));
      for (const Param& p : checkpoint.params) {
        memory.push_back(std::make_unique<GpuMemory>(r % gpus, static_cast<size_t>(p.rows * p.cols) * 2));
        params.addresses.push_back(reinterpret_cast<Element*>(memory.back()->data()));
      }
    }
    auto store = std::make_unique<GpuStore>(std::vector{params}, threads);
    const GpuMemory staging(0, GpuStore::kRingBytes);
    const auto ring = std::make_unique<PinnedRing>(16, GpuStore::kRingBytes / 16);
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");

    const auto pieces = static_cast<int64_t>((checkpoint.bytes + kPiece - 1) / kPiece);
    const auto read_piece = [&](int64_t i, uint8_t* to) {
      const uint64_t from = static_cast<uint64_t>(i) * kPiece;
      const uint64_t count = std::min(kPiece, checkpoint.bytes - from);
      if (!read_at(fd, from, to, count).ok(count)) throw std::runtime_error("read: " + path);
    };
    // Reads once, so that the file is in the page cache.
    pool.parallel_for(pieces, [&](int64_t i, int t) {
      read_piece(i, ring->slot(static_cast<size_t>(t) / 8) + static_cast<size_t>(t) % 8 * kPiece);
    });

    checkpoint.job.sources = {{fd, nullptr, 0}};
    WriteJob buffer_job = checkpoint.job;
    std::vector<uint8_t> buffer(checkpoint.bytes);
    pool.parallel_for(pieces,
                      [&](int64_t i, int) { read_piece(i, buffer.data() + static_cast<uint64_t>(i) * kPiece); });
    buffer_job.sources = {{-1, buffer.data(), buffer.size()}};

    const auto write = [&](const WriteJob& job) {
      const WriteOutcome outcome = store->write(job);
      if (!outcome.error.empty()) throw std::runtime_error("write: " + outcome.error);
    };
    std::vector<Contestant> all;
    all.push_back({"pinned host to device copies of 16 MiB",
                   [&](cudaStream_t) {
                     for (uint64_t at = 0, turn = 0; at < checkpoint.bytes; at += ring->slot_bytes(), turn++) {
                       const size_t count = std::min<uint64_t>(ring->slot_bytes(), checkpoint.bytes - at);
                       check(cudaMemcpyAsync(staging.data() + turn % 16 * ring->slot_bytes(), ring->slot(turn), count,
                                             cudaMemcpyHostToDevice, stream),
                             "copy");
                     }
                     check(cudaStreamSynchronize(stream), "copy");
                   },
                   {}});
    all.push_back({"reads of 2 MiB into pinned memory on all threads",
                   [&](cudaStream_t) {
                     pool.parallel_for(pieces, [&](int64_t i, int) {
                       const auto at = static_cast<size_t>(i) % (16 * 8);
                       read_piece(i, ring->slot(at / 8) + at % 8 * kPiece);
                     });
                   },
                   {}});
    all.push_back({"write from the file", [&](cudaStream_t) { write(checkpoint.job); }, {}});
    all.push_back({"write from memory", [&](cudaStream_t) { write(buffer_job); }, {}});
    take_turns_by_clock(all, turns);
    const size_t slower = all[1].median() > all[0].median() ? 1 : 0;
    std::swap(all[0], all[slower]);
    print_table("page cache to GPU, beside the slower of its two halves", all, bytes);

    // Checks that everything has arrived.
    for (const Rect& rect : checkpoint.job.rects) {
      if (rect.cols != checkpoint.job.tensors[static_cast<size_t>(rect.tensor)].cols) continue;
      const Tensor& tensor = checkpoint.job.tensors[static_cast<size_t>(rect.tensor)];
      const uint64_t want = checksum_run(buffer.data() + tensor.at(rect.src_row, 0), DType::kBFloat16,
                                         static_cast<uint64_t>(rect.src_row * tensor.cols), rect.rows * rect.cols);
      std::vector<int64_t> cols(checkpoint.job.tensors.size());
      cols[static_cast<size_t>(rect.tensor)] = tensor.cols;
      if (rect.tensor % 37 != 0) continue;
      const uint64_t got = store->checksum({rect}, cols)[0];
      if (got != want) {
        std::printf("WRONG: tensor %d of rank %d\n", rect.tensor, rect.rank);
        return 1;
      }
    }
    store.reset();
    cudaStreamDestroy(stream);
    close(fd);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "disk_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
