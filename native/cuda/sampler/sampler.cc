#include "cuda/sampler/sampler.h"

#include <stdexcept>

#include "cuda/sampler/sampler_job.h"

namespace refit::cuda {
namespace {

constexpr size_t kAlignment = 16;

int chunks_of(int vocab) { return (vocab + kSampleChunk - 1) / kSampleChunk; }

// Divides a region among its users in order; without a region it only counts bytes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <class T>
  T* take(size_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

size_t carve(void* base, int64_t rows, int vocab, SampleScratch& scratch) {
  Carver carver(base);
  const size_t chunks = static_cast<size_t>(rows) * chunks_of(vocab);
  scratch.best = carver.take<ChunkBest>(chunks);
  scratch.draws = carver.take<ChunkDraw>(chunks);
  scratch.least = carver.take<Composite>(rows);
  scratch.scales = carver.take<RowScale>(rows);
  scratch.counts = carver.take<int32_t>(static_cast<size_t>(kCountArrays) * vocab);
  return carver.used();
}

}  // namespace

SampleTraits sample_traits(const StepBatch& batch, int vocab) {
  SampleTraits traits;
  for (int r = 0; r < batch.rows(); ++r) {
    const int32_t* ints = batch.row_ints.data() + static_cast<size_t>(r) * kRowInts;
    const float* floats = batch.row_floats.data() + static_cast<size_t>(r) * kRowFloats;
    const bool draws = ints[1] < 0 && floats[0] != 0.0f && ints[2] != 1;
    traits.filters |= draws && ((ints[2] > 0 && ints[2] < vocab) || floats[1] < 1.0f);
    traits.penalties |= batch.history_offsets[r + 1] > batch.history_offsets[r] &&
                        (floats[3] != 0.0f || floats[4] != 0.0f || floats[5] != 1.0f);
    traits.raw |= (ints[4] & kRowRawLogprob) != 0;
    traits.tops |= ints[3] > 0;
    traits.kept |= wants_kept(batch, r);
  }
  traits.bias = !batch.bias_tokens.empty();
  traits.ids = !batch.ids.empty();
  return traits;
}

size_t sampler_scratch_bytes(int64_t rows, int vocab) {
  SampleScratch scratch;
  return carve(nullptr, rows, vocab, scratch);
}

void sample(float* logits, int64_t ld, int vocab, const SampleRows& rows, int first_row, int count,
            const SampleTraits& traits, const SampleOutput& output, void* scratch, cudaStream_t stream) {
  if (count <= 0) return;
  if (ld % 4 != 0 || ld < vocab || reinterpret_cast<uintptr_t>(logits) % 16 != 0)
    throw std::invalid_argument("sampler: logits must be aligned to 16 bytes and their rows a multiple of 4 floats");
  SampleJob job{logits, ld, vocab, chunks_of(vocab), rows, first_row, count, output, {}};
  carve(scratch, count, vocab, job.scratch);
  const bool adjusted = traits.penalties || traits.bias;
  if (adjusted) adjust_logits(job, traits.raw, stream);
  find_best(job, false, stream);
  if (traits.filters) find_limits(job, stream);
  draw_tokens(job, false, stream);
  if (traits.kept) report_kept(job, stream);
  if (traits.raw) {
    if (adjusted) restore_logits(job, stream);
    find_best(job, true, stream);
    draw_tokens(job, true, stream);
  }
  if (traits.tops) report_tops(job, stream);
  if (traits.ids) report_ids(job, stream);
}

}  // namespace refit::cuda
