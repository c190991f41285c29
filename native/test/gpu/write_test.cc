// Writes onto GPUs against the CPU's store with the same job: from files, memory, pinned memory and GPUs, for several
// ranks, with faults; and reads back.
//   write_test [--quick] [--host] [--seed N]     --host: only the tests that need no GPU
//
// The executor is compiled again here with its fault points, so the library's is not linked.
#define REFIT_FAULTS
#include "cuda/weights/write.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/fault.cc"
#include "core/store.h"
#include "core/write/write_check.h"
#include "cuda/device/check.h"
#include "cuda/weights/ipc_driver.h"
#include "cuda/weights/write_ring.cc"
#include "cuda/weights/write_run.cc"
#include "test/check.h"
#include "test/gpu/write_float32.cuh"
#include "test/gpu/write_world.cuh"
#include "test/random.h"

using namespace refit;
using namespace refit::cuda;
using test::Random;

namespace {

void batches_carry_the_job(uint64_t seed) {
  Random random(seed);
  Fixture f;
  fill(f, random, static_cast<int>(1 + random.below(3)), {Place::kMemory, Place::kMemory}, 60, 90);
  f.place();
  const ChunkLimits limits{static_cast<uint64_t>(8 + random.below(4000)), static_cast<uint64_t>(8 + random.below(4000)),
                           static_cast<uint64_t>(8 + random.below(500))};
  const uint64_t slot_bytes = limits.row + limits.straight + limits.staged + static_cast<uint64_t>(random.below(9000));
  std::vector<uint8_t> read(f.job.tensors.size());
  for (uint8_t& r : read) r = random.chance(4) ? 0 : 1;
  const BatchPlan plan = plan_batches(f.job, read, f.config.params, slot_bytes, limits);
  Store store(f.config);
  Pool pool(1);
  store.scramble(seed, pool);
  std::vector<std::vector<uint16_t>> params;
  for (int r = 0; r < store.ranks(); r++) {
    for (int p = 0; p < store.params(); p++) {
      const auto* data = static_cast<const uint16_t*>(store.param(r, p));
      params.emplace_back(data, data + store.shape(p).rows * store.shape(p).cols);
    }
  }
  const auto apply = [&](const Copy2d& copy) {
    for (int64_t r = 0; r < copy.rows; r++) {
      for (int64_t c = 0; c < copy.cols; c++) {
        const uint8_t* from = static_cast<const uint8_t*>(copy.src) + r * copy.src_row_bytes + c * copy.src_col_bytes;
        uint32_t bits = 0;
        std::memcpy(&bits, from, size_of(copy.dtype));
        reinterpret_cast<uint16_t*>(copy.dst)[r * copy.dst_cols + c] =
            static_cast<uint16_t>(convert_bits(copy.dtype, kElementType, bits));
      }
    }
    const uint64_t run = run_bytes(copy);
    if (run == 0) return;
    CHECK(run == static_cast<uint64_t>(copy.rows * copy.cols) * 2 && std::memcmp(copy.src, copy.dst, run) == 0);
  };
  const auto param_of = [&](const Rect& rect) {
    return reinterpret_cast<Element*>(params[static_cast<size_t>(rect.rank * store.params() + rect.param)].data());
  };
  std::vector<uint8_t> slot(slot_bytes);
  size_t next = 0;
  for (size_t b = 0; b < plan.batches.size(); b++) {
    const Batch& batch = plan.batches[b];
    CHECK(batch.first_chunk == next && batch.chunks > 0);
    std::fill(slot.begin(), slot.end(), 0xEE);
    uint64_t end = 0;
    for (size_t i = next; i < next + batch.chunks; i++) {
      const Chunk& chunk = plan.plan.chunks[i];
      const Tensor& tensor = f.job.tensors[static_cast<size_t>(chunk.tensor)];
      const uint64_t span = chunk_span(chunk, tensor);
      CHECKF(
          plan.batch_of[i] == b && plan.offsets[i] >= end && plan.offsets[i] + span <= slot_bytes && read[chunk.tensor],
          "seed %lu, chunk %zu", static_cast<unsigned long>(seed), i);
      end = plan.offsets[i] + span;
      std::memcpy(&slot[plan.offsets[i]], &f.bytes[static_cast<size_t>(tensor.source)][tensor.at(chunk.row, chunk.col)],
                  span);
    }
    for (size_t i = next; i < next + batch.chunks; i++) {
      const Chunk& chunk = plan.plan.chunks[i];
      for (size_t k = 0; k < chunk.rects; k++) {
        const Rect& rect = f.job.rects[static_cast<size_t>(plan.plan.rects[chunk.first_rect + k])];
        apply(chunk_copy(f.job.tensors[static_cast<size_t>(chunk.tensor)], chunk, rect,
                         f.config.params[static_cast<size_t>(rect.param)], &slot[plan.offsets[i]], param_of(rect)));
      }
    }
    next += batch.chunks;
  }
  CHECK(next == plan.plan.chunks.size());
  for (const Rect& rect : f.job.rects) {
    if (rect.rows == 0 || rect.cols == 0 || read[static_cast<size_t>(rect.tensor)]) continue;
    const Tensor& tensor = f.job.tensors[static_cast<size_t>(rect.tensor)];
    apply(rect_copy(tensor, rect, f.config.params[static_cast<size_t>(rect.param)],
                    f.bytes[static_cast<size_t>(tensor.source)].data(), param_of(rect)));
  }
  const WriteOutcome outcome = store.write(f.host_job(), pool);
  CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
  for (size_t i = 0; i < params.size(); i++) {
    const void* expected = store.param(static_cast<int>(i) / store.params(), static_cast<int>(i) % store.params());
    CHECKF(std::memcmp(expected, params[i].data(), params[i].size() * 2) == 0, "seed %lu, parameter %zu",
           static_cast<unsigned long>(seed), i);
  }
}

// --- on the GPU

void random_jobs_arrive(uint64_t seed, int gpus, int64_t rows, int64_t cols) {
  Random random(seed);
  Fixture f;
  std::vector<Place> places;
  const int count = static_cast<int>(1 + random.below(4));
  for (int i = 0; i < count; i++) places.push_back(static_cast<Place>(random.below(4)));
  fill(f, random, static_cast<int>(1 + random.below(3)), places, rows, cols);
  f.place();
  World world(f.config, gpus);
  world.scramble(seed);
  const std::string what = "seed " + std::to_string(seed);
  world.compare(what + ", scrambled");
  const WriteOutcome outcome = world.store->write(f.job);
  const WriteOutcome wanted = world.expected.write(f.host_job(), world.pool);
  CHECKF(outcome.error.empty(), "%s: %s", what.c_str(), outcome.error.c_str());
  CHECKF(outcome.states == wanted.states, "%s", what.c_str());
  world.compare(what + ", written");

  // Reads and checksums of the same contents.
  std::vector<Rect> rects;
  std::vector<int64_t> columns;
  for (int i = 0; i < 12; i++) {
    const int rank = static_cast<int>(random.below(f.config.ranks));
    const int p = static_cast<int>(random.below(static_cast<int64_t>(f.config.params.size())));
    const Param& shape = f.config.params[static_cast<size_t>(p)];
    Rect rect{
        i, rank, p, random.below(1000), random.below(30), 0, 0, random.below(shape.rows), random.below(shape.cols)};
    rect.rows = random.below(shape.rows - rect.dst_row + 1);
    rect.cols = random.below(shape.cols - rect.dst_col + 1);
    rects.push_back(rect);
    columns.push_back(rect.src_col + rect.cols + random.below(20));
    std::vector<uint8_t> got(static_cast<size_t>(rect.rows * rect.cols) * 2 + 1, 0xEE), want = got;
    world.store->read(rank, p, rect.dst_row, rect.dst_col, rect.rows, rect.cols, got.data());
    world.expected.read(rank, p, rect.dst_row, rect.dst_col, rect.rows, rect.cols, want.data());
    CHECKF(got == want, "%s: read of %ld x %ld at %ld, %ld", what.c_str(), long(rect.rows), long(rect.cols),
           long(rect.dst_row), long(rect.dst_col));
  }
  CHECKF(world.store->checksum(rects, columns) == world.expected.checksum(rects, columns, world.pool), "%s",
         what.c_str());
}

// More than the ring holds, so that slots are used again, and chunks of every kind at full size.
void a_job_larger_than_the_ring_arrives(int gpus, uint64_t megabytes) {
  Fixture f;
  f.places = {Place::kFile};
  f.bytes.resize(1);
  f.config.ranks = 2;
  const auto rows = static_cast<int64_t>(megabytes << 20) / (3 * 4096 * 2);
  f.config.params = {{"rows", rows / 2, 4096}, {"cols", rows, 2048}, {"copy", rows, 4096}};
  for (Param& param : f.config.params) param.dtype = kElementType;
  for (int t = 0; t < 3; t++) {
    f.job.tensors.push_back({0, 8 + static_cast<uint64_t>(t * rows) * 8192, cuda::kElementType, rows, 4096, 8192, 2});
  }
  for (int r = 0; r < 2; r++) f.job.rects.push_back({0, r, 0, r * (rows / 2), 0, rows / 2, 4096, 0, 0});
  for (int r = 0; r < 2; r++) f.job.rects.push_back({1, r, 1, 0, r * 2048, rows, 2048, 0, 0});
  for (int r = 0; r < 2; r++) f.job.rects.push_back({2, r, 2, 0, 0, rows, 4096, 0, 0});
  f.bytes[0].resize(8 + static_cast<size_t>(3 * rows) * 8192);
  for (size_t i = 0; i + 8 <= f.bytes[0].size(); i += 8) {
    const uint64_t z = splitmix64_mix(i);
    std::memcpy(&f.bytes[0][i], &z, 8);
  }
  f.place();
  World world(f.config, gpus);
  world.scramble(5);
  for (int turn = 0; turn < 2; turn++) {
    const WriteOutcome outcome = world.store->write(f.job);
    CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
    const uint64_t needed = 2 * static_cast<uint64_t>(rows) * 8192 + static_cast<uint64_t>(rows / 2 * 2) * 8192;
    CHECKF(outcome.bytes == needed, "each byte is read once for all ranks: %lu of %lu",
           static_cast<unsigned long>(outcome.bytes), static_cast<unsigned long>(needed));
  }
  world.expected.write(f.host_job(), world.pool);
  world.compare("larger than the ring");
}

// Rings of few slots, where readers and ranks often wait for each other.
void small_rings_do_not_stall(uint64_t seed) {
  Random random(seed);
  Fixture f;
  fill(f, random, 2, {Place::kFile, Place::kMemory}, 3000, 2500);
  f.place();
  World world(f.config, 1);
  for (const size_t slots : {1, 2, 5}) {
    world.scramble(seed + slots);
    std::unique_ptr<PinnedRing> ring;
    std::vector<std::unique_ptr<RankWriter>> writers(2);
    on_all(world.ranks, [&](Rank& rank) {
      if (rank.index == 0) ring = std::make_unique<PinnedRing>(slots, 8 << 20);
      writers[static_cast<size_t>(rank.index)] = std::make_unique<RankWriter>(slots);
    });
    Pool openers(1);
    GpuIpc shared(world.ranks);
    ipc::Mappings mappings(shared, openers);
    std::vector<Pace> paces(world.ranks.size(), Pace(0));
    WriteRun run(world.params, f.job, *ring, writers, paces, mappings);
    run.run(world.pool);
    const WriteOutcome outcome = run.outcome();
    CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
    world.expected.write(f.host_job(), world.pool);
    world.compare(std::to_string(slots) + " slots");
    on_all(world.ranks, [&](Rank& rank) {
      writers[static_cast<size_t>(rank.index)].reset();
      if (rank.index == 0) ring.reset();
    });
  }
}

// Each tensor has a parameter of its own, so that parts can be distinguished.
void fill_plain(Fixture& f, Place place, DType dtype) {
  f.config.ranks = 2;
  f.places = {place};
  f.bytes.resize(1);
  uint64_t end = 1;
  for (int t = 0; t < 6; t++) {
    const int64_t rows = 300 + 40 * t, cols = 512;
    const uint64_t element = size_of(dtype);
    const bool split = t % 2 == 1;
    f.config.params.push_back({"t" + std::to_string(t), rows, split ? cols / 2 : cols, kElementType});
    f.job.tensors.push_back({0, end, dtype, rows, cols, cols * element, element});
    end += static_cast<uint64_t>(rows * cols) * element;
    for (int r = 0; r < 2; r++) {
      f.job.rects.push_back({t, r, t, 0, split ? r * cols / 2 : 0, rows, split ? cols / 2 : cols, 0, 0});
    }
  }
  f.bytes[0].resize(end);
  for (size_t i = 0; i < end; i++) f.bytes[0][i] = static_cast<uint8_t>(splitmix64_mix(i));
}

// The parameters hold what the states claim.
void check_states(World& world, const Fixture& f, const WriteOutcome& outcome,
                  const std::vector<std::vector<uint16_t>>& before, const std::string& what) {
  world.expected.write(f.host_job(), world.pool);
  for (size_t i = 0; i < before.size(); i++) {
    const size_t t = i % f.config.params.size();
    const auto state = static_cast<TensorState>(outcome.states[t]);
    if (state == TensorState::kPartial) continue;
    const auto* whole = static_cast<const uint16_t*>(
        world.expected.param(static_cast<int>(i / f.config.params.size()), static_cast<int>(t)));
    const std::vector<uint16_t> want =
        state == TensorState::kWritten ? std::vector<uint16_t>(whole, whole + before[i].size()) : before[i];
    CHECKF(world.on_gpu(i) == want, "%s: tensor %zu of rank %zu is not what state %d says", what.c_str(), t,
           i / f.config.params.size(), int(state));
  }
}

std::vector<std::vector<uint16_t>> contents(const World& world) {
  std::vector<std::vector<uint16_t>> out;
  for (size_t i = 0; i < world.blocks.size(); i++) out.push_back(world.on_gpu(i));
  return out;
}

void states_are_exact_at_every_fault(fault::Point point, Place place) {
  Fixture f;
  fill_plain(f, place, DType::kFloat32);
  f.place();
  World world(f.config, 1);
  int fired = 0;
  for (int64_t k = 1; k < 1000; k++) {
    world.scramble(static_cast<uint64_t>(k));
    const auto before = contents(world);
    fault::arm(point, k, fault::Action::kFail, 0);
    const WriteOutcome outcome = world.store->write(f.job);
    fault::disarm();
    const std::string what = "point " + std::to_string(int(point)) + ", pass " + std::to_string(k);
    check_states(world, f, outcome, before, what);
    if (outcome.error.empty()) {
      for (const uint8_t state : outcome.states) CHECK(state == static_cast<uint8_t>(TensorState::kWritten));
      break;
    }
    fired++;
    CHECKF(outcome.error.find("injected fault") == 0, "%s", outcome.error.c_str());
    CHECKF(outcome.error_tensor >= 0 && outcome.states[static_cast<size_t>(outcome.error_tensor)] != 2, "%s",
           what.c_str());
  }
  CHECKF(fired >= 6, "%d", fired);
}

void refusals_leave_all_untouched() {
  Fixture f;
  fill_plain(f, Place::kFile, cuda::kElementType);
  f.place();
  World world(f.config, 1);
  world.scramble(3);
  const auto before = contents(world);
  fault::arm(fault::Point::kAlloc, 1, fault::Action::kFail, 0);
  WriteOutcome outcome = world.store->write(f.job);
  fault::disarm();
  CHECKF(outcome.error == "no memory for read buffers" && outcome.error_tensor == -1, "%s", outcome.error.c_str());
  for (const uint8_t state : outcome.states) CHECK(state == 0);
  CHECK(contents(world) == before);

  const std::atomic<bool> cancel = true;
  f.job.cancel = &cancel;
  outcome = world.store->write(f.job);
  CHECKF(outcome.error == "the write was cancelled", "%s", outcome.error.c_str());
  CHECK(contents(world) == before);
  f.job.cancel = nullptr;

  // A file that ends early: bytes before its end may be written.
  const Tensor& third = f.job.tensors[2];
  CHECK(ftruncate(f.fds[0], static_cast<off_t>(third.offset + 100)) == 0);
  outcome = world.store->write(f.job);
  CHECKF(outcome.error.find("file ended at byte ") == 0 && outcome.error_tensor >= 2, "%s", outcome.error.c_str());
  check_states(world, f, outcome, before, "a file that ends early");

  f.job.sources[0].fd = 1000000;
  world.scramble(3);
  outcome = world.store->write(f.job);
  CHECKF(outcome.error == "read at byte 1: Bad file descriptor" || outcome.error.find("read at byte ") == 0, "%s",
         outcome.error.c_str());
  CHECK(outcome.bytes == 0 && contents(world) == before);

  WriteJob empty;
  outcome = world.store->write(empty);
  CHECK(outcome.error.empty() && outcome.states.empty());
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, host_only = false;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--host") == 0) host_only = true;
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = std::strtoull(argv[++i], nullptr, 10);
  }
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  for (uint64_t i = 0; i < (quick ? 20 : 400); i++) batches_carry_the_job(seed + i);
  if (host_only) return test::finish("write_test --host");
  try {
    const int gpus = usable_gpus();
    std::printf("%d GPU(s)\n", gpus);
    for (uint64_t i = 0; i < (quick ? 2 : 12); i++)
      random_jobs_arrive(seed + i, gpus, quick ? 40 : 300, quick ? 60 : 400);
    refusals_leave_all_untouched();
    float32_parameters_arrive(seed);
    if (!quick) {
      random_jobs_arrive(seed + 50, gpus, 2000, 3000);
      small_rings_do_not_stall(seed);
      for (const Place place : {Place::kFile, Place::kMemory}) {
        states_are_exact_at_every_fault(fault::Point::kRead, place);
        states_are_exact_at_every_fault(fault::Point::kCopy, place);
      }
      states_are_exact_at_every_fault(fault::Point::kCopy, Place::kGpu);
      a_job_larger_than_the_ring_arrives(gpus, 700);
    }
  } catch (const std::exception& e) {
    CHECKF(false, "%s", e.what());
  }
  return test::finish("write_test");
}
