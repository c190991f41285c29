// A step's data on its way to the GPUs and back, as one block of bytes in each direction.
//
// In: first the data for all ranks, then the data for the sampling rank, then scratch that is not copied.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/step.h"
#include "cuda/adapters/adapter_segments.h"
#include "cuda/attention/attention.h"
#include "cuda/forward/step_room.h"
#include "cuda/sampler/sampler.h"

namespace refit::cuda {

// The places of the data in the block on a GPU.
struct StepView {
  const uint64_t* epoch;      // one: collectives of the ranks before the step
  const int32_t* tokens;      // [T]
  const int32_t* positions;   // [T] absolute
  const int32_t* slots;       // [T] page * page_size + slot; kNoSlot: the token is padding
  AttentionInput attention;   // without `parts`
  const int32_t* row_tokens;  // [R] index of the token whose logits a row uses
  SampleRows rows;            // only on the rank that samples
  // Without adapters in the step: no segments, and null.
  AdapterSegments adapters;    // of the tokens
  const int32_t* token_slots;  // [T]
};

class StepBlock {
 public:
  // The batch has been checked. It and the plan must stay until the last call of write. head_rows: the rows that the
  // head computes at a time. The offsets of all that the layers read depend on the room only.
  StepBlock(const StepBatch& batch, const AttentionPlan& plan, const StepRoom& room, int page_size, int vocab,
            int64_t head_rows);

  size_t shared_bytes() const { return shared_bytes_; }  // for every rank
  size_t bytes() const { return bytes_; }                // for the sampling rank
  size_t gpu_bytes() const { return gpu_bytes_; }        // with scratch

  // Writes the block to `host`, which has bytes(). epoch: see StepView.
  void write(uint8_t* host, uint64_t epoch) const;
  // The step's new tokens in the block at `host`.
  int32_t* tokens(uint8_t* host) const { return reinterpret_cast<int32_t*>(host + tokens_); }
  // base: the block on a GPU, aligned to 16.
  StepView view(uint8_t* base) const;
  // The segments of the head's block of rows that begins at `row`; their first rows count from there.
  AdapterSegments head_adapters(const uint8_t* base, int64_t row) const;
  // Largest absolute position.
  int32_t furthest() const { return furthest_; }

 private:
  void cut_adapters();
  template <class T>
  size_t place(size_t count);
  // Zeros follow `from` where there is room for `room` elements.
  template <class T>
  static void put(uint8_t* host, size_t offset, const T& from, size_t room = 0);

  const StepBatch& batch_;
  const AttentionPlan& plan_;
  const StepRoom room_;
  const int64_t head_rows_;
  // Empty without adapters in the step.
  std::vector<int32_t> token_slots_;
  SegmentList segments_;
  std::vector<SegmentList> head_segments_;
  std::vector<int32_t> positions_, slots_, row_tokens_, row_positions_, top_offsets_, kept_offsets_;
  int32_t furthest_ = 0;
  size_t gpu_bytes_ = 0, shared_bytes_ = 0, bytes_ = 0;
  // Offsets in the block.
  size_t epoch_, tokens_, positions_at_, slots_at_, items_, merges_, prefixes_, members_, pages_;
  size_t row_tokens_at_, token_slots_at_, segments_at_;
  std::vector<size_t> head_segments_at_;
  size_t row_ints_, row_floats_, row_seeds_, row_positions_at_, history_offsets_, history_, bias_offsets_, bias_tokens_,
      bias_values_, id_offsets_, ids_, masks_, top_offsets_at_, kept_offsets_at_, saved_history_, saved_bias_;
};

class ResultBlock {
 public:
  // `recorded`: recorded experts of each token (Layout).
  ResultBlock(const StepBatch& batch, int64_t recorded, int vocab);
  size_t bytes() const { return bytes_; }
  SampleOutput view(uint8_t* base) const;
  // [T, recorded], in the block at `base`.
  uint16_t* experts(uint8_t* base) const { return reinterpret_cast<uint16_t*>(base + experts_); }
  void read(const uint8_t* host, StepResult& result) const;

 private:
  size_t rows_, tops_ = 0, ids_, recorded_;
  std::vector<int32_t> kept_offsets_;  // empty if no row wants its kept set
  size_t tokens_, logprobs_, top_ids_, top_logprobs_, id_logprobs_, experts_, kept_counts_, kept_logprobs_, kept_ids_,
      bytes_ = 0;
};

}  // namespace refit::cuda
