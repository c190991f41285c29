#include "cuda/forward/step_block.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace refit::cuda {
namespace {

constexpr size_t kPartAlignment = 16;

size_t padded_part(size_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

// Prefix sums of the room of the rows' kept sets; empty if no row wants its kept set.
std::vector<int32_t> kept_offsets(const StepBatch& batch, int vocab) {
  std::vector<int32_t> offsets{0};
  for (int r = 0; r < batch.rows(); ++r) offsets.push_back(offsets.back() + kept_room(batch, r, vocab));
  if (offsets.back() == 0) offsets.clear();
  return offsets;
}

template <class T>
const T* at(const uint8_t* base, size_t offset) {
  return reinterpret_cast<const T*>(base + offset);
}

}  // namespace

template <class T>
size_t StepBlock::place(size_t count) {
  const size_t offset = gpu_bytes_;
  gpu_bytes_ += padded_part(count * sizeof(T));
  return offset;
}

StepBlock::StepBlock(const StepBatch& batch, const AttentionPlan& plan, const StepRoom& room, int page_size, int vocab,
                     int64_t head_rows)
    : batch_(batch), plan_(plan), room_(room), head_rows_(head_rows), kept_offsets_(kept_offsets(batch, vocab)) {
  const size_t tokens = static_cast<size_t>(room.tokens), rows = static_cast<size_t>(batch.rows());
  positions_.resize(tokens);
  slots_.resize(tokens, kNoSlot);
  for (int s = 0; s < batch.sequences(); ++s) {
    for (int32_t t = batch.seq_offsets[s]; t < batch.seq_offsets[s + 1]; ++t) {
      const int32_t position = batch.start_pos[s] + (t - batch.seq_offsets[s]);
      positions_[t] = position;
      slots_[t] = batch.pages[batch.page_offsets[s] + position / page_size] * page_size + position % page_size;
      furthest_ = std::max(furthest_, position);
    }
  }
  row_tokens_.resize(rows);
  row_positions_.resize(rows);
  top_offsets_.assign(rows + 1, 0);
  for (size_t r = 0; r < rows; ++r) {
    const int32_t* ints = batch.row_ints.data() + r * kRowInts;
    row_tokens_[r] = ints[0];
    row_positions_[r] = positions_[ints[0]] + 1;
    top_offsets_[r + 1] = top_offsets_[r] + ints[3];
  }
  cut_adapters();

  epoch_ = place<uint64_t>(1);
  tokens_ = place<int32_t>(tokens);
  positions_at_ = place<int32_t>(tokens);
  slots_at_ = place<int32_t>(tokens);
  items_ = place<AttentionItem>(static_cast<size_t>(room.items));
  merges_ = place<AttentionMerge>(static_cast<size_t>(room.merges));
  prefixes_ = place<AttentionPrefix>(static_cast<size_t>(room.prefixes));
  members_ = place<AttentionMember>(room.prefixes == 0 ? 0 : tokens);
  token_slots_at_ = place<int32_t>(token_slots_.size());
  segments_at_ = place<AdapterSegment>(segments_.list.size());
  pages_ = place<int32_t>(batch.pages.size());
  row_tokens_at_ = place<int32_t>(rows);
  for (const SegmentList& block : head_segments_) head_segments_at_.push_back(place<AdapterSegment>(block.list.size()));
  shared_bytes_ = gpu_bytes_;

  row_ints_ = place<int32_t>(batch.row_ints.size());
  row_floats_ = place<float>(batch.row_floats.size());
  row_seeds_ = place<uint64_t>(rows);
  row_positions_at_ = place<int32_t>(rows);
  history_offsets_ = place<int32_t>(batch.history_offsets.size());
  history_ = place<int32_t>(batch.history.size());
  bias_offsets_ = place<int32_t>(batch.bias_offsets.size());
  bias_tokens_ = place<int32_t>(batch.bias_tokens.size());
  bias_values_ = place<float>(batch.bias_values.size());
  id_offsets_ = place<int32_t>(batch.id_offsets.size());
  ids_ = place<int32_t>(batch.ids.size());
  masks_ = place<uint32_t>(batch.masks.size());
  top_offsets_at_ = place<int32_t>(top_offsets_.size());
  kept_offsets_at_ = place<int32_t>(kept_offsets_.size());
  bytes_ = gpu_bytes_;

  saved_history_ = place<float>(batch.history.size());
  saved_bias_ = place<float>(batch.bias_tokens.size());
}

void StepBlock::cut_adapters() {
  if (!uses_adapters(batch_)) return;
  token_slots_ = token_slots(batch_);
  segments_ = cut_segments(token_slots_);
  if (room_.is_rounded) segments_ = pad_segments(segments_, room_.adapters, room_.tokens);
  token_slots_.resize(positions_.size(), -1);
  std::vector<int32_t> row_slots;
  for (const int32_t token : row_tokens_) row_slots.push_back(token_slots_[token]);
  const std::span<const int32_t> slots(row_slots);
  for (size_t row = 0; row < slots.size(); row += static_cast<size_t>(head_rows_)) {
    head_segments_.push_back(
        cut_segments(slots.subspan(row, std::min(static_cast<size_t>(head_rows_), slots.size() - row))));
  }
}

AdapterSegments StepBlock::head_adapters(const uint8_t* base, int64_t row) const {
  if (head_segments_.empty()) return {};
  const auto block = static_cast<size_t>(row / head_rows_);
  return head_segments_[block].at(at<AdapterSegment>(base, head_segments_at_[block]));
}

template <class T>
void StepBlock::put(uint8_t* host, size_t offset, const T& from, size_t room) {
  if (from.size() > 0) std::memcpy(host + offset, from.data(), from.size() * sizeof(from[0]));
  if (room > from.size())
    std::memset(host + offset + from.size() * sizeof(from[0]), 0, (room - from.size()) * sizeof(from[0]));
}

void StepBlock::write(uint8_t* host, uint64_t epoch) const {
  put(host, epoch_, std::span<const uint64_t>(&epoch, 1));
  put(host, tokens_, batch_.tokens, positions_.size());
  put(host, positions_at_, positions_);
  put(host, slots_at_, slots_);
  put(host, pages_, batch_.pages);
  put(host, items_, plan_.items, static_cast<size_t>(room_.items));
  put(host, merges_, plan_.merges, static_cast<size_t>(room_.merges));
  put(host, prefixes_, plan_.prefixes, static_cast<size_t>(room_.prefixes));
  put(host, members_, plan_.members);
  put(host, row_tokens_at_, row_tokens_);
  put(host, token_slots_at_, token_slots_);
  put(host, segments_at_, segments_.list);
  for (size_t i = 0; i < head_segments_.size(); ++i) put(host, head_segments_at_[i], head_segments_[i].list);
  put(host, row_ints_, batch_.row_ints);
  put(host, row_floats_, batch_.row_floats);
  put(host, row_seeds_, batch_.row_seeds);
  put(host, row_positions_at_, row_positions_);
  put(host, history_offsets_, batch_.history_offsets);
  put(host, history_, batch_.history);
  put(host, bias_offsets_, batch_.bias_offsets);
  put(host, bias_tokens_, batch_.bias_tokens);
  put(host, bias_values_, batch_.bias_values);
  put(host, id_offsets_, batch_.id_offsets);
  put(host, ids_, batch_.ids);
  put(host, masks_, batch_.masks);
  put(host, top_offsets_at_, top_offsets_);
  put(host, kept_offsets_at_, kept_offsets_);
}

StepView StepBlock::view(uint8_t* base) const {
  StepView view;
  view.epoch = at<uint64_t>(base, epoch_);
  view.tokens = at<int32_t>(base, tokens_);
  view.positions = at<int32_t>(base, positions_at_);
  view.slots = at<int32_t>(base, slots_at_);
  view.attention.items = at<AttentionItem>(base, items_);
  view.attention.item_count = room_.items;
  view.attention.merges = at<AttentionMerge>(base, merges_);
  view.attention.merge_count = room_.merges;
  view.attention.pages = at<int32_t>(base, pages_);
  view.attention.parts = nullptr;
  view.attention.wide_items = plan_.wide_items;
  view.attention.wide = plan_.wide;
  view.attention.prefixes = at<AttentionPrefix>(base, prefixes_);
  view.attention.prefix_count = room_.prefixes;
  view.attention.members = at<AttentionMember>(base, members_);
  view.row_tokens = at<int32_t>(base, row_tokens_at_);
  view.adapters = segments_.at(at<AdapterSegment>(base, segments_at_));
  if (room_.is_rounded) view.adapters.host = nullptr;  // a graph serves other lists
  view.token_slots = token_slots_.empty() ? nullptr : at<int32_t>(base, token_slots_at_);
  view.rows.row_ints = at<int32_t>(base, row_ints_);
  view.rows.row_floats = at<float>(base, row_floats_);
  view.rows.row_seeds = at<uint64_t>(base, row_seeds_);
  view.rows.positions = at<int32_t>(base, row_positions_at_);
  view.rows.history_offsets = at<int32_t>(base, history_offsets_);
  view.rows.history = at<int32_t>(base, history_);
  view.rows.bias_offsets = at<int32_t>(base, bias_offsets_);
  view.rows.bias_tokens = at<int32_t>(base, bias_tokens_);
  view.rows.bias_values = at<float>(base, bias_values_);
  view.rows.id_offsets = at<int32_t>(base, id_offsets_);
  view.rows.ids = at<int32_t>(base, ids_);
  view.rows.masks = at<uint32_t>(base, masks_);
  view.rows.top_offsets = at<int32_t>(base, top_offsets_at_);
  view.rows.kept_offsets = at<int32_t>(base, kept_offsets_at_);
  view.rows.saved_history = reinterpret_cast<float*>(base + saved_history_);
  view.rows.saved_bias = reinterpret_cast<float*>(base + saved_bias_);
  return view;
}

ResultBlock::ResultBlock(const StepBatch& batch, int64_t recorded, int vocab)
    : rows_(static_cast<size_t>(batch.rows())),
      ids_(batch.ids.size()),
      recorded_(batch.tokens.size() * static_cast<size_t>(recorded)),
      kept_offsets_(kept_offsets(batch, vocab)) {
  for (size_t r = 0; r < rows_; ++r) tops_ += static_cast<size_t>(batch.row_ints[r * kRowInts + 3]);
  const auto place = [this](size_t count, size_t size = 4) {
    const size_t offset = bytes_;
    bytes_ += padded_part(count * size);
    return offset;
  };
  experts_ = place(recorded_, sizeof(uint16_t));  // first: graphs hold its address
  tokens_ = place(rows_);
  logprobs_ = place(rows_);
  top_ids_ = place(tops_);
  top_logprobs_ = place(tops_);
  id_logprobs_ = place(ids_);
  const size_t kept_rows = kept_offsets_.empty() ? 0 : rows_;
  kept_counts_ = place(kept_rows);
  kept_logprobs_ = place(kept_rows);
  kept_ids_ = place(kept_rows == 0 ? 0 : static_cast<size_t>(kept_offsets_.back()));
}

SampleOutput ResultBlock::view(uint8_t* base) const {
  return {reinterpret_cast<int32_t*>(base + tokens_),      reinterpret_cast<float*>(base + logprobs_),
          reinterpret_cast<int32_t*>(base + top_ids_),     reinterpret_cast<float*>(base + top_logprobs_),
          reinterpret_cast<float*>(base + id_logprobs_),   reinterpret_cast<int32_t*>(base + kept_counts_),
          reinterpret_cast<float*>(base + kept_logprobs_), reinterpret_cast<int32_t*>(base + kept_ids_)};
}

void ResultBlock::read(const uint8_t* host, StepResult& result) const {
  const auto get = [host](size_t offset, size_t count, auto& to) {
    to.resize(count);
    if (count > 0) std::memcpy(to.data(), host + offset, count * sizeof(to[0]));
  };
  get(tokens_, rows_, result.tokens);
  get(logprobs_, rows_, result.logprobs);
  get(top_ids_, tops_, result.top_ids);
  get(top_logprobs_, tops_, result.top_logprobs);
  get(id_logprobs_, ids_, result.id_logprobs);
  get(experts_, recorded_, result.experts);
  const size_t kept_rows = kept_offsets_.empty() ? 0 : rows_;
  get(kept_counts_, kept_rows, result.kept_counts);
  get(kept_logprobs_, kept_rows, result.kept_logprobs);
  result.kept_ids.clear();
  const auto* ids = reinterpret_cast<const int32_t*>(host + kept_ids_);
  for (size_t r = 0; r < kept_rows; ++r) {
    const int32_t room = kept_offsets_[r + 1] - kept_offsets_[r];
    // The GPU writes nothing for other rows.
    if (room == 0) result.kept_counts[r] = 0, result.kept_logprobs[r] = std::numeric_limits<float>::quiet_NaN();
    if (result.kept_counts[r] <= room)
      result.kept_ids.insert(result.kept_ids.end(), ids + kept_offsets_[r],
                             ids + kept_offsets_[r] + result.kept_counts[r]);
  }
}

}  // namespace refit::cuda
