import type { Mutant } from './mutant.ts'

export const nativeCpu: readonly Mutant[] = [
  {
    why: 'RoPE turns the upper half the wrong way',
    file: 'native/cpu/rope.cc',
    before: 'turned[hi + i] = x[lo + i] * sin[i];',
    after: 'turned[hi + i] = -x[lo + i] * sin[i];',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'RoPE tables grow from the wrong position',
    file: 'native/cpu/rope.cc',
    before: 'for (int64_t p = positions_; p < positions; ++p) {',
    after: 'for (int64_t p = positions_ + 1; p < positions; ++p) {',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: "yarn's attention factor scales the cosine only",
    file: 'native/cpu/rope.cc',
    before: 'sin[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale_;',
    after: 'sin[i] = static_cast<float>(std::sin(static_cast<double>(angle)));',
    tests: ['test/e2e/goldens.test.ts']
  },
  {
    why: 'the norm adds no epsilon',
    file: 'native/cpu/norm.cc',
    before: 'return 1.0f / std::sqrt(sum_squares / static_cast<float>(n) + eps);',
    after: 'return 1.0f / std::sqrt(sum_squares / static_cast<float>(n) + 0 * eps);',
    tests: ['native/test/forward_test.cc', 'test/e2e/goldens.test.ts']
  },
  {
    why: "the last rank's part of a sum is left out",
    file: 'native/cpu/norm.cc',
    before: 'for (int rank = 1; rank < ranks; ++rank) add(sum, parts[rank] + row * n, n);',
    after: 'for (int rank = 1; rank < ranks - 1; ++rank) add(sum, parts[rank] + row * n, n);',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'ties between experts go to the higher index',
    file: 'native/cpu/moe.cc',
    before: 'while (at > 0 && (p[i] > p[ids[at - 1]] ||',
    after: 'while (at > 0 && (p[i] >= p[ids[at - 1]] ||',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'weights of chosen experts are never normalised',
    file: 'native/cpu/moe.cc',
    before: 'if (model_.recipe.norm_topk_prob) {',
    after: 'if (model_.recipe.norm_topk_prob && k > 2) {',
    tests: ['native/test/forward_test.cc', 'test/e2e/goldens.test.ts']
  },
  {
    why: 'recorded experts of all tokens are those of the first',
    file: 'native/cpu/moe.cc',
    before: 'std::copy_n(ids, model_.recipe.experts_per_token, record + row * stride);',
    after: 'std::copy_n(chosen_.data(), model_.recipe.experts_per_token, record + row * stride);',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'values of the KV cache are written with the stride of keys',
    file: 'native/cpu/kv_cache.cc',
    before: `static_cast<int64_t>(slot) * dim;
`,
    after: `static_cast<int64_t>(slot) * page_size;
`,
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'a position in a page is taken from the sequence start',
    file: 'native/cpu/forward/forward.cc',
    before: 'places_[t] = {position, page, position % cache_.page_size()};',
    after: 'places_[t] = {position, page, (t - batch.seq_offsets[s]) % cache_.page_size()};',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: "a vocabulary shard embeds its neighbour's token",
    file: 'native/cpu/forward/forward.cc',
    before: 'model_.embed, id % model_.vocab_rows),',
    after: 'model_.embed, id % (model_.vocab_rows + 1)),',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'top-k keeps one token too many',
    file: 'native/cpu/sampler/sampler_mask.cc',
    before: 'drop_from(std::min<size_t>(order.size(), k - above), prob, order);',
    after: 'drop_from(std::min<size_t>(order.size(), k - above + 1), prob, order);',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'top-p drops the token that crosses the limit',
    file: 'native/cpu/sampler/sampler_mask.cc',
    before: 'drop_from(kept, prob, order);',
    after: 'drop_from(kept > 1 ? kept - 1 : kept, prob, order);',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'min-p drops the token that equals the bound',
    file: 'native/cpu/sampler/sampler_mask.cc',
    before: 'prob[i] >= min_p ? prob[i] : 0.0f',
    after: 'prob[i] > min_p ? prob[i] : 0.0f',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'the frequency penalty counts the prompt',
    file: 'native/cpu/sampler/sampler_penalty.cc',
    before: 'for (const int32_t token : history.subspan(prompt)) ++counts[token];',
    after: 'for (const int32_t token : history) ++counts[token];',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'the repetition penalty favours tokens with negative logits',
    file: 'native/cpu/sampler/sampler_penalty.cc',
    before: 'z = z > 0.0f ? z / penalties.repetition : z * penalties.repetition;',
    after: 'z = z / penalties.repetition;',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'a mask of a grammar forgets the last, incomplete word',
    file: 'native/cpu/sampler/sampler_penalty.cc',
    before: 'const int end = std::min(32, vocab - base);',
    after: 'const int end = std::min(32, vocab - base) / 32 * 32;',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'raw logprobs are those after temperature and bias',
    file: 'native/cpu/sampler/sampler.cc',
    before: 'if (!raw) return report(r, token, logits, max, std::log(sum), scratch);',
    after: 'return report(r, token, logits, max, std::log(sum), scratch);',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'top logprobs of the second row are written over those of the first',
    file: 'native/cpu/sampler/sampler.cc',
    before: 'result_->top_ids[top_offsets_[r] + i] = scratch.order[i];',
    after: 'result_->top_ids[i] = scratch.order[i];',
    tests: ['native/test/sampler/sampler_test.cc']
  },
  {
    why: 'a NaN among the logits wins',
    file: 'native/cpu/sampler/sampler_order.cc',
    before: 'if (z[i] > z[best] || (z[best] != z[best] && z[i] == z[i])) best = i;',
    after: 'if (!(z[i] <= z[best])) best = i;',
    tests: ['native/test/sampler/sampler_test.cc', 'native/test/kernels_test.cc']
  }
]
