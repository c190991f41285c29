// Sequences that are decoded step by step, as batches for a Forward.
#pragma once
#include "test/gpu/forward_gpus.cuh"

namespace {

struct Chat {
  std::vector<int32_t> tokens, pages;
};

bool same(const StepResult& a, const StepResult& b) {
  return a.tokens == b.tokens && a.logprobs == b.logprobs && a.top_ids == b.top_ids &&
         a.top_logprobs == b.top_logprobs && a.experts == b.experts;
}

// The next token of some chats, with the logprobs of the whole vocabulary.
BatchBuilder decode(const std::vector<Chat>& chats, const std::vector<size_t>& which, int vocab, unsigned seed) {
  BatchBuilder b;
  for (const size_t i : which) {
    const Chat& chat = chats[i];
    const auto last = static_cast<int32_t>(chat.tokens.size()) - 1;
    const int token = b.sequence({chat.tokens.back()}, last, chat.pages);
    b.row({.token = token, .top = vocab, .flags = 1, .temperature = 0.7f, .seed = seed + i});
  }
  return b;
}

// The same with guessed tokens behind the last one of each chat, and a row after each of them.
BatchBuilder guess(const std::vector<Chat>& chats, const std::vector<size_t>& which,
                   const std::vector<std::vector<int32_t>>& guesses, int vocab, unsigned seed) {
  BatchBuilder b;
  for (size_t i = 0; i < which.size(); ++i) {
    const Chat& chat = chats[which[i]];
    std::vector<int32_t> tokens{chat.tokens.back()};
    tokens.insert(tokens.end(), guesses[i].begin(), guesses[i].end());
    const int first = b.sequence(tokens, static_cast<int32_t>(chat.tokens.size()) - 1, chat.pages);
    for (int t = 0; t < static_cast<int>(tokens.size()); ++t) {
      b.row({.token = first + t, .top = vocab, .flags = 1, .temperature = 0.7f, .seed = seed + which[i]});
    }
  }
  return b;
}

}  // namespace
