#include "core/step_check.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace refit {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("malformed step: " + what); }

std::string at(const char* what, int64_t index) { return std::string(what) + " " + std::to_string(index); }

void check_length(const char* name, size_t got, size_t expected, const char* formula) {
  if (got != expected) {
    fail(std::string(name) + " has " + std::to_string(got) + " entries, expected " + std::to_string(expected) + " (" +
         formula + ")");
  }
}

// Offsets start at 0, never decrease, and end at the length of the list that they split.
void check_offsets(const char* name, std::span<const int32_t> offsets, size_t count, size_t total) {
  check_length(name, offsets.size(), count + 1, "one more than it divides");
  if (offsets[0] != 0) fail(std::string(name) + " starts at " + std::to_string(offsets[0]) + ", expected 0");
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      fail(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(offsets[i]) +
           " is below the one before it, " + std::to_string(offsets[i - 1]));
    }
  }
  if (static_cast<size_t>(offsets.back()) != total) {
    fail(std::string(name) + " ends at " + std::to_string(offsets.back()) + ", but there are " + std::to_string(total) +
         " entries");
  }
}

void check_ids(const char* name, std::span<const int32_t> ids, int limit, const char* limit_name) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= limit) {
      fail(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(ids[i]) + " is outside [0, " +
           std::to_string(limit) + ") of the " + limit_name);
    }
  }
}

// `fed_rows`: see BatchLimits.
void check_tokens(std::span<const int32_t> tokens, int vocab, int fed_rows) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (is_fed(tokens[i]) ? fed_row(tokens[i]) < fed_rows : tokens[i] < vocab) continue;
    const std::string rows =
        fed_rows == 0 ? "" : ", nor one of " + std::to_string(fed_rows) + " rows of the step before";
    fail("tokens[" + std::to_string(i) + "] = " + std::to_string(tokens[i]) + " is outside [0, " +
         std::to_string(vocab) + ") of the vocabulary" + rows);
  }
}

void check_range(int row, const char* name, double value, bool ok, const char* expected) {
  if (!ok) fail(at("row", row) + ": " + name + " = " + std::to_string(value) + ", expected " + expected);
}

void check_sequences(const StepBatch& b, const BatchLimits& limits) {
  const size_t n = b.start_pos.size();
  check_offsets("seqOffsets", b.seq_offsets, n, b.tokens.size());
  check_offsets("pageOffsets", b.page_offsets, n, b.pages.size());
  check_tokens(b.tokens, limits.vocab, limits.fed_rows);
  check_ids("pages", b.pages, limits.pages, "KV cache");
  if (!b.adapters.empty()) check_length("adapters", b.adapters.size(), n, "none, or one per sequence");
  for (size_t s = 0; s < b.adapters.size(); ++s) {
    if (b.adapters[s] < -1 || b.adapters[s] >= limits.adapter_slots) {
      fail(at("sequence", s) + " has adapter slot " + std::to_string(b.adapters[s]) + ", expected -1 or one of " +
           std::to_string(limits.adapter_slots));
    }
  }
  std::unordered_map<int32_t, size_t> writer;
  for (size_t s = 0; s < n; ++s) {
    const int64_t fresh = b.seq_offsets[s + 1] - b.seq_offsets[s], start = b.start_pos[s];
    if (fresh == 0) fail(at("sequence", s) + " has no tokens");
    if (start < 0) fail(at("sequence", s) + " starts at position " + std::to_string(start));
    const int64_t needed = (start + fresh + limits.page_size - 1) / limits.page_size;
    const int64_t held = b.page_offsets[s + 1] - b.page_offsets[s];
    if (held < needed) {
      fail(at("sequence", s) + " holds " + std::to_string(held) + " pages of " + std::to_string(limits.page_size) +
           " tokens, but ends at position " + std::to_string(start + fresh) + " and needs " + std::to_string(needed));
    }
    for (int64_t i = start / limits.page_size; i < needed; ++i) {
      const int32_t page = b.pages[b.page_offsets[s] + i];
      if (const auto [it, fresh_page] = writer.emplace(page, s); !fresh_page) {
        fail("page " + std::to_string(page) + " would be written twice, for sequences " + std::to_string(it->second) +
             " and " + std::to_string(s));
      }
    }
  }
}

void check_row(const StepBatch& b, const BatchLimits& limits, int masks, int row) {
  const int32_t* ints = b.row_ints.data() + static_cast<size_t>(row) * kRowInts;
  const float* floats = b.row_floats.data() + static_cast<size_t>(row) * kRowFloats;
  const int history = b.history_offsets[row + 1] - b.history_offsets[row];
  check_range(row, "token index", ints[0], ints[0] >= 0 && static_cast<size_t>(ints[0]) < b.tokens.size(),
              "an index into tokens");
  check_range(row, "target", ints[1], ints[1] >= -1 && ints[1] < limits.vocab, "-1 or a token of the vocabulary");
  check_range(row, "top_k", ints[2], ints[2] >= 0, "0 (off) or more");
  check_range(row, "top logprobs", ints[3], ints[3] >= 0 && ints[3] <= limits.vocab, "0 to the size of the vocabulary");
  check_range(row, "flags", ints[4], (ints[4] & ~(kRowWantLogprob | kRowRawLogprob | kRowWantKept)) == 0,
              "known flags");
  check_range(row, "historyPrompt", ints[5], ints[5] >= 0 && ints[5] <= history, "0 to the length of its history");
  check_range(row, "mask", ints[6], ints[6] >= -1 && ints[6] < masks, "-1 or the index of a mask");
  check_range(row, "temperature", floats[0], floats[0] >= 0 && std::isfinite(floats[0]), "0 or more, finite");
  check_range(row, "top_p", floats[1], floats[1] >= 0 && floats[1] <= 1, "0 to 1");
  check_range(row, "min_p", floats[2], floats[2] >= 0 && floats[2] <= 1, "0 to 1");
  check_range(row, "frequency penalty", floats[3], std::isfinite(floats[3]), "a finite number");
  check_range(row, "presence penalty", floats[4], std::isfinite(floats[4]), "a finite number");
  check_range(row, "repetition penalty", floats[5], floats[5] > 0 && std::isfinite(floats[5]),
              "a finite number above 0");
}

}  // namespace

void check_batch(const StepBatch& b, const BatchLimits& limits) {
  // Positions and offsets are 32-bit, so larger sizes cannot be described.
  if (b.tokens.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) fail("more than 2^31 tokens");
  check_sequences(b, limits);
  const size_t rows = b.row_seeds.size();
  check_length("rowInts", b.row_ints.size(), rows * kRowInts, "ROW_INTS per row");
  check_length("rowFloats", b.row_floats.size(), rows * kRowFloats, "ROW_FLOATS per row");
  check_offsets("historyOffsets", b.history_offsets, rows, b.history.size());
  check_offsets("biasOffsets", b.bias_offsets, rows, b.bias_tokens.size());
  check_length("biasValues", b.bias_values.size(), b.bias_tokens.size(), "one per bias token");
  check_offsets("idOffsets", b.id_offsets, rows, b.ids.size());
  check_ids("history", b.history, limits.vocab, "vocabulary");
  check_ids("biasTokens", b.bias_tokens, limits.vocab, "vocabulary");
  check_ids("ids", b.ids, limits.vocab, "vocabulary");
  const size_t words = mask_words(limits.vocab);
  if (b.masks.size() % words != 0)
    fail("masks has " + std::to_string(b.masks.size()) + " words, expected a multiple of " + std::to_string(words));
  const int masks = static_cast<int>(b.masks.size() / words);
  for (size_t row = 0; row < rows; ++row) check_row(b, limits, masks, static_cast<int>(row));
}

}  // namespace refit
