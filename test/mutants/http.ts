import type { Mutant } from './mutant.ts'

export const http: readonly Mutant[] = [
  {
    why: 'a second signal runs destructors beside native threads',
    file: 'src/cli/serve.ts',
    before: 'exit: endProcess,',
    after: 'exit: code => process.exit(code),',
    tests: ['test/cli/signals-in-receive.test.ts']
  },
  {
    why: 'aborted requests are counted twice',
    file: 'src/http/metrics.ts',
    before: 'this.#finished.inc({ finished_reason: sample.finish.type })',
    after: "this.#finished.inc({ finished_reason: sample.finish.type }, sample.finish.type === 'abort' ? 2 : 1)",
    tests: ['test/routes/refit/metrics.test.ts']
  },
  {
    why: 'the API key opens routes of the admin',
    file: 'src/http/auth.ts',
    before: "const wanted = level === 'normal' ? api : admin ?? api",
    after: "const wanted = level === 'normal' ? api : api ?? admin",
    tests: ['test/auth.test.ts']
  },
  {
    why: 'a closed route is open without an admin key',
    file: 'src/http/auth.ts',
    before: "if (level === 'admin-only' && admin === undefined) {",
    after: "if (level === 'admin-only' && admin === undefined && api !== undefined) {",
    tests: ['test/auth.test.ts']
  },
  {
    why: 'a route may declare no level',
    file: 'src/http/auth.ts',
    before: `  app.addHook('onRoute', requireLevel)
`,
    after: '',
    tests: ['test/auth.test.ts']
  },
  {
    why: 'a failed sample leaves the others running',
    file: 'src/http/generation/generation.ts',
    before: `          this.abort()
          throw error`,
    after: '          throw error',
    tests: ['test/http/generation.test.ts']
  },
  {
    why: 'the error of a batch is lost if its last sample succeeds',
    file: 'src/http/generation/generation.ts',
    before: "const failed = outcomes.find(outcome => outcome.status === 'rejected')",
    after: "const failed = outcomes.slice(-1).find(outcome => outcome.status === 'rejected')",
    tests: ['test/http/generation.test.ts']
  },
  {
    why: 'a client that disconnects leaves its request running',
    file: 'src/http/generation/generation.ts',
    before: 'if (!raw.writableFinished) generation.abort()',
    after: 'if (raw.writableFinished) generation.abort()',
    tests: ['test/routes/sglang/generate-sockets.test.ts']
  },
  {
    why: 'tokens of newer weights pass as the bound version',
    file: 'src/http/generation/generation.ts',
    before: 'tokens.length === 0 || version.suits(weightVersion)) return',
    after: 'tokens.length >= 0 || version.suits(weightVersion)) return',
    tests: ['test/http/bound-version.test.ts']
  },
  {
    why: 'a request waits for a version that has gone by',
    file: 'src/http/generation/bound-version.ts',
    before: 'isPast: label => trailingNumber(label) > wanted',
    after: 'isPast: label => trailingNumber(label) < 0',
    tests: ['test/http/bound-version.test.ts']
  },
  {
    why: 'the first version of a batch is that of its last sample',
    file: 'src/http/generation/bound-version.ts',
    before: '[Math.min(...starts), Math.max(...ends)]',
    after: '[starts.at(-1)!, Math.max(...ends)]',
    tests: ['test/http/bound-version.test.ts']
  },
  {
    why: 'usage counts a prompt for each of its samples',
    file: 'src/http/openai/openai-output.ts',
    before: 'samples.filter((_, i) => i % n === 0)',
    after: 'samples.filter((_, i) => i % n < n)',
    tests: ['test/routes/openai/completions.test.ts', 'test/routes/openai/chat.test.ts']
  },
  {
    why: 'logprobs of -Infinity become null',
    file: 'src/http/openai/openai-output.ts',
    before: 'return Math.max(logprob, -9999)',
    after: 'return logprob',
    tests: [
      'test/routes/openai/completions.test.ts',
      'test/routes/openai/chat.test.ts',
      'test/routes/openai/chat-exact.test.ts',
      'test/routes/vllm/generate-logprobs.test.ts'
    ]
  },
  {
    why: 'top logprobs of a streamed chunk are those of the first tokens',
    file: 'src/http/openai/chat-logprobs.ts',
    before: 'sample.top.at(from + i)',
    after: 'sample.top.at(i)',
    tests: ['test/http/chat-logprobs.test.ts']
  },
  {
    why: 'a truncated prompt keeps its beginning',
    file: 'src/http/generation/truncation.ts',
    before: "return side === 'right' ? ids.subarray(0, kept) : ids.slice(-kept)",
    after: "return side !== 'left' ? ids.subarray(0, kept) : ids.slice(-kept)",
    tests: [
      'test/http/fields.test.ts',
      'test/routes/vllm/generate.test.ts',
      'test/routes/openai/completions.test.ts',
      'test/routes/openai/trainers-openai.test.ts'
    ]
  },
  {
    why: 'an escaped backslash hides the end of a long text',
    file: 'src/http/parse-json.ts',
    before: 'if (slashes % 2 === 0) break',
    after: 'if (slashes === 0) break',
    tests: ['test/http/parse-json.test.ts']
  },
  {
    why: 'texts of digits become token ids',
    file: 'src/http/lax.ts',
    before: `if (branches.some(branch => fits(branch, value))) return value
`,
    after: '',
    tests: ['test/http/validation.test.ts']
  },
  {
    why: 'a body that stalls holds its place for ever',
    file: 'src/http/upload/upload-watch.ts',
    before: 'if (request.isPaused() || received !== before) timer.refresh()',
    after: 'if (request.isPaused() || received >= before) timer.refresh()',
    tests: [
      'test/http/hold-body.test.ts',
      'test/e2e/upload-refusals.test.ts',
      'test/e2e/upload-slow.test.ts',
      'test/e2e/upload.test.ts'
    ]
  },
  {
    why: 'a stop text that ends below min_new_tokens is obeyed',
    file: 'src/engine/text-generation.ts',
    before: 'before + i + 1 >= this.#request',
    after: 'before + i + 2 >= this.#request',
    tests: ['test/engine/text-generation.test.ts']
  },
  {
    why: 'an incomplete character at the end is lost',
    file: 'src/engine/text-generation.ts',
    before: "const rest = this.#detokenizer?.flush() ?? ''",
    after: "const rest = ''",
    tests: ['test/engine/text-generation.test.ts']
  },
  {
    why: 'experts of tokens behind a stop text are returned',
    file: 'src/engine/text-generation.ts',
    before: 'rows(stopped.completionTokens) * experts.length',
    after: 'rows(completionTokens) * experts.length',
    tests: [
      'test/engine/text-generation.test.ts',
      'test/routes/sglang/routed-experts.test.ts',
      'test/e2e/routed-experts.test.ts'
    ]
  },
  {
    why: 'abort_all of SGLang ends the named request only',
    file: 'routes/sglang/control.ts',
    before: 'if (all) engine.abortAll()',
    after: "if (all && rid === '') engine.abortAll()",
    tests: ['test/routes/sglang/control.test.ts']
  },
  {
    why: 'a continue with torn weights reports success',
    file: 'routes/sglang/control.ts',
    before: `if (weights.state === 'torn') {
    return`,
    after: `if (weights.state === 'torn' && weights.tensors.length > 1) {
    return`,
    tests: ['test/routes/sglang/control.test.ts', 'test/routes/sglang/weights.test.ts']
  },
  {
    why: 'a sleep joins one that a wake-up will undo',
    file: 'src/weights/inverse-call-joiner.ts',
    before: `    if (kind !== this.#kind) this.#turn++
`,
    after: '',
    tests: ['test/routes/vllm/sleep.test.ts', 'test/routes/sglang/memory.test.ts']
  },
  {
    why: "vLLM's top_k of 0 keeps no token",
    file: 'src/dialects/vllm/sampling.ts',
    before: 'top_k: fields.top_k === 0 ? -1 : fields.top_k,',
    after: 'top_k: fields.top_k,',
    tests: ['test/routes/vllm/generate.test.ts', 'test/routes/openai/completions.test.ts']
  },
  {
    why: 'the frequency penalty of vLLM is the presence penalty',
    file: 'src/dialects/vllm/sampling.ts',
    before: 'frequency_penalty: fields.frequency_penalty,',
    after: 'frequency_penalty: fields.presence_penalty,',
    tests: ['test/routes/vllm/generate.test.ts']
  },
  {
    why: 'a seed of 64 bits is rounded',
    file: 'src/http/generation/sampling.ts',
    before: 'return BigInt.asUintN(64, BigInt(seed))',
    after: 'return BigInt.asUintN(64, BigInt(Number(seed)))',
    tests: [
      'test/routes/sglang/generate.test.ts',
      'test/routes/sglang/generate-refusals.test.ts',
      'test/http/fields.test.ts'
    ]
  },
  {
    why: 'min_new_tokens above the limit is accepted',
    file: 'src/http/generation/sampling.ts',
    before: 'most === null || minNewTokens <= (most ?? fallback),',
    after: 'most == null || minNewTokens <= (most ?? fallback),',
    tests: ['test/routes/sglang/generate-refusals.test.ts', 'test/routes/sglang/generate.test.ts']
  },
  {
    why: 'senders of different buckets are not noticed',
    file: 'src/dialects/checkpoint-engine/bucket-receiver.ts',
    before: 'name !== first!.pieces[piece]!.name)',
    after: 'name === undefined && piece > first!.pieces.length)',
    tests: [
      'test/dialects/checkpoint-engine-update.test.ts',
      'test/dialects/checkpoint-engine.test.ts',
      'test/dialects/checkpoint-engine-stopped.test.ts'
    ]
  },
  {
    why: 'a refused adapter of buckets leaves its senders without replies',
    file: 'src/dialects/checkpoint-engine/adapter.ts',
    before: 'if (!isStopped) await peers?.dismiss(errorMessage(error))',
    after: 'if (isStopped) await peers?.dismiss(errorMessage(error))',
    tests: ['test/dialects/checkpoint-engine-adapter.test.ts']
  },
  {
    why: 'buckets of an adapter that does not fit are kept until the last one',
    file: 'src/dialects/checkpoint-engine/adapter.ts',
    before: 'requireAdapters(this.#engine).missingOf?.(',
    after: 'void ((..._: unknown[]) => {})(',
    tests: ['test/dialects/checkpoint-engine-adapter.test.ts']
  },
  {
    why: 'buckets of an adapter take memory without a limit',
    file: 'src/dialects/checkpoint-engine/adapter.ts',
    before: 'if (this.#bytes > most) {',
    after: 'if (this.#bytes < 0) {',
    tests: ['test/dialects/checkpoint-engine-adapter.test.ts']
  },
  {
    why: 'the page shows prompts without --ui-prompts',
    file: 'src/ui/engine-source.ts',
    before: '{ prompts = false }',
    after: '{ prompts = true }',
    tests: ['test/routes/refit/page.test.ts']
  },
  {
    why: 'a page that lost frames goes on without the changes in them',
    file: 'src/ui/feed-reader.ts',
    before: `    this.#waiting = []
    this.#anew = true`,
    after: '    this.#waiting = []',
    tests: ['test/ui/feed.test.ts']
  },
  {
    why: 'a retried report of logprobs counts again',
    file: 'src/http/samples/truth-meter.ts',
    before: 'sample.isMeasured || seen.has(claim.id)',
    after: 'seen.has(claim.id)',
    tests: ['test/routes/refit/truth.test.ts']
  },
  {
    why: 'a page begins with a first frame that is older than the last tick',
    file: 'src/ui/feed.ts',
    before: `      this.#hello = null
      for (`,
    after: '      for (',
    tests: ['test/ui/feed.test.ts']
  },
  {
    why: 'the log of updates keeps more than it says',
    file: 'src/updates/update-log.ts',
    before: 'this.#entries.length > KEPT_UPDATES',
    after: 'this.#entries.length > 2 * KEPT_UPDATES',
    tests: ['test/routes/refit/updates.test.ts']
  },
  {
    why: 'a span of a prefill contains the time in the queue',
    file: 'src/telemetry/sample-spans.ts',
    before: "part('prefill', begun, first)",
    after: "part('prefill', startedAt, first)",
    tests: ['test/telemetry/otlp.test.ts']
  },
  {
    why: 'refit bench takes the rank below a percentile',
    file: 'src/load/distribution.ts',
    before: 'Math.ceil(part',
    after: 'Math.floor(part',
    tests: ['test/load/distribution.test.ts']
  },
  {
    why: 'refit report shows fields that another server fills with prompts',
    file: 'src/report/scrub.ts',
    before: 'SECRET.test(name) || TEXT.test(name)',
    after: 'SECRET.test(name)',
    tests: ['test/cli/report.test.ts']
  },
  {
    why: 'an answer can change the terminal of refit chat',
    file: 'src/chat/terminal.ts',
    before: '\\x00-\\x08',
    after: '\\x00',
    tests: ['test/cli/chat.test.ts']
  },
  {
    why: 'a trainer that sends -log p is measured as if it were log p',
    file: 'src/http/samples/truth-meter.ts',
    before: 'value > ROUNDING',
    after: 'value > Infinity',
    tests: ['test/routes/refit/truth.test.ts']
  },
  {
    why: 'all refusals are counted as one',
    file: 'src/http/count-refusals.ts',
    before: 'refusalOf(error).code',
    after: "'INTERNAL'",
    tests: ['test/http/count-refusals.test.ts']
  },
  {
    why: 'a report has nothing that needs the admin key',
    file: 'src/report/collect.ts',
    before: 'path === ADMIN ? admin : normal',
    after: 'path === ADMIN ? normal : admin',
    tests: ['test/cli/report.test.ts']
  },
  {
    why: 'a receipt of mixed weights names the digest of the last ones',
    file: 'src/http/samples/kept-samples.ts',
    before: 'before === after ? before : null',
    after: 'Math.max(before, after)',
    tests: ['test/routes/refit/samples.test.ts']
  },
  {
    why: 'prompts are kept although nobody asked for it',
    file: 'src/http/samples/kept-samples.ts',
    before: 'plan.receipt !== true',
    after: 'plan.receipt === null',
    tests: ['test/routes/refit/samples.test.ts']
  },
  {
    why: 'a receipt promises the same bits on every GPU',
    file: 'src/http/samples/receipt.ts',
    before: 'exact: info.deterministic &&',
    after: 'exact:',
    tests: ['test/routes/refit/samples.test.ts']
  },
  {
    why: 'a replay takes other weights for the same',
    file: 'src/replay/compare-receipts.ts',
    before: 'if (wanted === held) return { equal: true,',
    after: 'if (wanted !== held) return { equal: true,',
    tests: ['test/cli/replay.test.ts']
  }
]
