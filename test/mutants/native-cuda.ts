import type { Mutant } from './mutant.ts'

export const nativeCuda: readonly Mutant[] = [
  {
    why: 'two steps under way share one block',
    file: 'native/cuda/forward/forward.cc',
    before: 'side_ ^= 1;',
    after: 'side_ = 0;',
    tests: ['native/test/gpu/device_test.cc']
  },
  {
    why: 'a broadcast may end behind its staging slot',
    file: 'native/cuda/group/group_receive.cc',
    before: 'if (part.offset <= room && part.bytes <= room - part.offset) continue;',
    after: 'if (part.offset <= room && part.bytes <= room) continue;',
    tests: ['test/native/nccl-groups.test.ts']
  },
  {
    why: 'a rank of this engine is accepted as the sender',
    file: 'native/cuda/group/group_receive.cc',
    before: '(root >= options_.first_rank && root <= last)) {',
    after: '(root > options_.first_rank && root < last)) {',
    tests: ['test/native/nccl-groups.test.ts']
  },
  {
    why: 'all parts of a broadcast go to the beginning of their slot',
    file: 'native/cuda/group/group_channel.cc',
    before: 'spans.push_back({slot_data(slot) + part.offset, part.bytes, 0});',
    after: 'spans.push_back({slot_data(slot), part.bytes, 0});',
    tests: ['test/native/nccl-groups.test.ts', 'test/e2e/vllm-nccl.test.ts']
  },
  {
    why: 'what was received is read from the beginning of its slot',
    file: 'native/cuda/group/group_channel.cc',
    before: 'gpu_->download(out.data(), slot_data(slot) + offset, bytes);',
    after: 'gpu_->download(out.data(), slot_data(slot), bytes);',
    tests: ['test/native/nccl-groups.test.ts', 'test/e2e/vllm-nccl.test.ts']
  },
  {
    why: 'the last rows of a very large copy are left out',
    file: 'native/cuda/scatter/scatter_plan.cc',
    before: 'for (int64_t r = 0; r < copy.rows; r += height) {',
    after: 'for (int64_t r = 0; r + height <= copy.rows; r += height) {',
    tests: ['native/test/gpu/scatter/scatter_test.cc']
  },
  {
    why: 'a strided vector is copied with the distance of its columns',
    file: 'native/cuda/scatter/scatter_plan.cc',
    before: `    copy.src_col_bytes = copy.src_row_bytes;
`,
    after: '',
    tests: ['native/test/gpu/scatter/scatter_test.cc']
  },
  {
    why: 'a rectangle of a chunk is written at the place of its first row',
    file: 'native/cuda/weights/write_batches.cc',
    before: 'part.dst_row += part.src_row - rect.src_row;',
    after: 'part.dst_row += 0;',
    tests: ['native/test/gpu/write_test.cc']
  },
  {
    why: 'a chunk that does not follow the one before is read behind it',
    file: 'native/cuda/weights/write_batches.cc',
    before: 'const bool follows = i > 0 && start == source_end &&',
    after: 'const bool follows = i > 0 && start >= source_end &&',
    tests: ['native/test/gpu/write_test.cc']
  },
  {
    why: "a checksum multiplies the last two elements of a group by each other's weights",
    file: 'native/cuda/weights/checksum.cu',
    before: 'parts.add_word<6>(v.w);',
    after: 'parts.add_word<4>(v.w);',
    tests: ['native/test/gpu/checksum_test.cc']
  },
  {
    why: 'the last chunk of a long attention is not merged',
    file: 'native/cuda/attention/attention_merge.cuh',
    before: 'for (int chunk = 1; chunk < merge.parts; chunk += kMergeAhead) {',
    after: 'for (int chunk = 1; chunk < merge.parts - 1; chunk += kMergeAhead) {',
    tests: ['native/test/gpu/attention/attention_test.cc']
  },
  {
    why: "a prefix's last, incomplete chunk takes the place of its complete ones",
    file: 'native/cuda/attention/attention_wide.cuh',
    before: 'begun ? 1 : 0)',
    after: '0)',
    tests: ['native/test/gpu/attention/attention_test.cc']
  },
  {
    why: 'sequences share a page that only some of them have',
    file: 'native/cuda/attention/attention_prefixes.cc',
    before: 'while (from < most && a.pages[from] == b.pages[from]) ++from;',
    after: 'while (from < most && a.pages[from] == b.pages[from]) ++from;\n  ++from;',
    tests: ['native/test/gpu/attention/attention_test.cc']
  },
  {
    why: 'neighbours in the order of page tables share all that one of them shares with a third',
    file: 'native/cuda/attention/attention_prefixes.cc',
    before: 'std::min(depth_of(i - 1), depth_of(i))',
    after: 'std::max(depth_of(i - 1), depth_of(i))',
    tests: ['native/test/gpu/attention/attention_test.cc']
  },
  {
    why: 'padding writes its keys into the first slot of the cache',
    file: 'native/cuda/forward/step_block.cc',
    before: 'slots_.resize(tokens, kNoSlot);',
    after: 'slots_.resize(tokens, 0);',
    tests: ['native/test/gpu/step_graphs_test.cc']
  },
  {
    why: 'padding takes experts',
    file: 'native/cuda/moe/moe_route.cu',
    before: 'if (kv_slots != nullptr && kv_slots[token] < 0) {',
    after: 'if (kv_slots != nullptr && kv_slots[token] < -1) {',
    tests: ['native/test/gpu/moe_test.cc']
  },
  {
    why: 'graphs outlive the block whose address they hold',
    file: 'native/cuda/forward/forward_rank.cc',
    before: '  graphs_.clear();\n',
    after: '',
    tests: ['native/test/gpu/step_graphs_test.cc']
  },
  {
    why: 'a step has room for one item of attention per token only',
    file: 'native/cuda/forward/step_room.cc',
    before: 'rounded_items(plan.items.size(), rounded),',
    after: 'rounded,',
    tests: ['native/test/gpu/step_graphs_test.cc']
  },
  {
    why: 'keys of the same step are read before they are written',
    file: 'native/cuda/attention/attention_plan.cc',
    before: '.old = batch.start_pos[tile.sequence],',
    after: '.old = tile.position,',
    tests: ['native/test/gpu/plan_test.cc', 'native/test/gpu/forward_test.cc']
  },
  {
    why: 'a step with guesses has no graph',
    file: 'native/cuda/attention/attention_plan.cc',
    before: '(sampled[s] && group <= kNarrowRows ? kNarrowRows : rows_of(wide))',
    after: 'rows_of(wide)',
    tests: ['native/test/gpu/plan_test.cc', 'native/test/gpu/step_graphs_test.cc']
  },
  {
    why: 'a graph holds the adapters of the step that it was made from',
    file: 'native/cuda/forward/step_block.cc',
    before: 'if (room_.is_rounded) view.adapters.host = nullptr;',
    after: '',
    tests: ['native/test/gpu/step_graphs_test.cc']
  },
  {
    why: 'segments beyond a power of two have no room',
    file: 'native/cuda/adapters/adapter_segments.cc',
    before: 'return {rounded_segments(counts.count),',
    after: 'return {rounded_segments(counts.count - 1),',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'every adapter is expanded with the matrix of the first slot',
    file: 'native/cuda/adapters/adapters_expand.cu',
    before: 'w.b + int64_t{segment.slot} * tiles.all_columns * w.rank + expand_column()',
    after: 'w.b + expand_column()',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'a block expands its third tile of columns with the B of its first',
    file: 'native/cuda/adapters/adapters_expand.cu',
    before: 'if (later < tiles.count) rows.fetch_b(ring, stage, expand_tile(tiles, later));',
    after: '',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'a block adds to its second tile of columns what it has loaded for its first',
    file: 'native/cuda/adapters/adapters_expand.cu',
    before: 'if (kAhead) now = next;',
    after: '',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'a block of a cluster adds its own sums in place of the other blocks',
    file: 'native/cuda/adapters/adapters_shrink.cuh',
    before: 'cluster_load(&sums[warp % kWarps][m][n], warp / kWarps)',
    after: 'cluster_load(&sums[warp % kWarps][m][n], rank())',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'lanes that share the activation of two rows take the columns of others',
    file: 'native/cuda/adapters/adapters_activate.cu',
    before: 'if (i / kPairs == part)',
    after: 'if (i / kPairs == (part ^ 1))',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: "what a slot holds beyond an adapter's own rank counts",
    file: 'native/cuda/adapters/adapters_device.cuh',
    before: 'return {entry.x, min((static_cast<int>(entry.y) + 15) / 16 * 16, rank)};',
    after: 'return {entry.x, rank};',
    tests: ['native/test/gpu/adapters/adapters_test.cc']
  },
  {
    why: 'k is turned by the position of the first token',
    file: 'native/cuda/forward/elementwise_rope.cu',
    before: 'a.rope + static_cast<int64_t>(a.positions[token]) * dim + i;',
    after: 'a.rope + static_cast<int64_t>(a.positions[is_k ? 0 : token]) * dim + i;',
    tests: ['native/test/gpu/elementwise_test.cc']
  },
  {
    why: 'top-p forgets the limit of top-k',
    file: 'native/cuda/sampler/sampler_filter.cu',
    before: 'least = select(z, true, max, least, BinsByProb{row.top_p, max}, shared);',
    after: 'least = select(z, true, max, 0, BinsByProb{row.top_p, max}, shared);',
    tests: ['native/test/gpu/sampler_test.cc']
  }
]
