import t from 'tap'
import type { Test } from 'tap'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { prompt, rolloutRequest } from '../helpers/rollout.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Guesses change no bit of an output: neither tokens, logprobs, kept sets, experts nor the reason of the end.

const PROMPTS = [5, 40, 17].map((length, i) => prompt(i, length, 320))

/** Samples of three prompts: four seeds each, plain and with filters, stops, minimum lengths and alternatives. */
function samples (hasExperts: boolean): GenerateRequest[] {
  return PROMPTS.flatMap((ids, p) =>
    [0, 1, 2, 3].map(i => {
      const request = rolloutRequest(ids, {
        maxNewTokens: 20 + 7 * i,
        seed: BigInt(100 * p + (i >> 1)),
        temperature: i === 3 ? 0 : 1,
        topK: p === 1 ? 20 : 0,
        minNewTokens: p === 2 ? 15 : 0,
        stopTokenIds: p === 2 ? [7, 19, 31, 44, 101, 200, 300] : [],
        ...p === 1 && i > 1 ? { badWords: [[11], [200, 3], [17, 20]] } : {}
      }, { top: i, ids: p === 0 ? [3, 5] : [] })
      return { ...request, kept: p === 1, ...hasExperts ? { expertsFrom: 3 } : {} }
    })
  )
}

async function outputs (engine: LocalEngine, requests: readonly GenerateRequest[]): Promise<object[]> {
  return await Promise.all(requests.map(async request => {
    const events: TokenEvent[] = []
    for await (const event of engine.generate(request)) events.push(event)
    const last = events.at(-1)!
    return {
      tokens: events.flatMap(({ tokens }) => tokens),
      logprobs: events.flatMap(({ logprobs }) => logprobs),
      top: events.flatMap(({ top }) => top),
      ids: events.flatMap(({ ids }) => ids),
      kept: events.flatMap(({ kept }) => kept ?? []),
      counts: events.map(({ completionTokens }) => completionTokens),
      experts: last.experts,
      finish: last.finish
    }
  }))
}

async function engineOf (t: Test, folder: string, options: EngineOptions): Promise<LocalEngine> {
  const engine = await createEngine(folder, { threads: 1, maxTotalTokens: 2048, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

async function load (engine: LocalEngine, root: string, folder: string): Promise<void> {
  const source = await openDiskSource(folder, { roots: [root] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ version: folder, requireAll: true })
  await source.close()
}

for (
  const [architecture, tp, disableOverlapSchedule] of [
    ['Qwen3ForCausalLM', 1, false],
    ['Qwen3ForCausalLM', 2, true],
    ['Qwen3MoeForCausalLM', 2, false],
    ['MistralForCausalLM', 1, true]
  ] as const
) {
  t.test(
    `${architecture}, tp ${tp}, ${disableOverlapSchedule ? 'without' : 'with'} overlap: outputs are those without ` +
      'guesses, through an update',
    async t => {
      const root = t.testdir()
      const [first, second] = [1, 2].map(seed => join(root, String(seed))) as [string, string]
      writeModelFolder(first, tinyConfig(architecture), { values: randomValues(1) })
      writeModelFolder(second, tinyConfig(architecture), { values: randomValues(2) })
      const hasExperts = architecture === 'Qwen3MoeForCausalLM'
      const options = { tp, disableOverlapSchedule, enableReturnRoutedExperts: hasExperts }
      const plain = await engineOf(t, first, options)
      const guesses = { speculative: 'siblings', disableAdaptiveSpeculation: true } as const
      const guessing = await engineOf(t, first, { ...options, ...guesses })
      t.same(guessing.info.speculative, { draftTokens: 16 })
      t.equal(plain.info.speculative, undefined)

      const epoch = async (name: string): Promise<{ right: number, wrong: number }> => {
        const before = guessing.stats
        t.strictSame(await outputs(guessing, samples(hasExperts)), await outputs(plain, samples(hasExperts)), name)
        const right = guessing.stats.acceptedTokens - before.acceptedTokens
        return { right, wrong: guessing.stats.draftTokens - before.draftTokens - right }
      }
      await epoch('the first epoch')
      const again = await epoch('the same again')
      t.ok(again.right > 20, `${again.right} guesses were right`)
      const steps = guessing.stats.steps
      await load(plain, root, second)
      await load(guessing, root, second)
      const other = await epoch('other weights, guesses of the old ones')
      t.ok(other.wrong > 0, `${other.wrong} guesses were wrong`)
      await load(plain, root, first)
      await load(guessing, root, first)
      const back = await epoch('the first weights again: their outputs were kept')
      t.ok(back.right > 20, `${back.right} guesses were right`)
      t.equal(plain.stats.draftTokens, 0)
      t.ok(guessing.stats.steps - steps < plain.stats.steps, 'fewer steps')
      t.equal(guessing.stats.usedTokens, 0)
    }
  )
}

t.test('a small KV cache: pages for guesses take none from requests', async t => {
  const root = t.testdir()
  writeModelFolder(root, tinyConfig('Qwen3ForCausalLM'), { values: randomValues(1) })
  const options = { maxTotalTokens: 160, contextLength: 128, maxRunningRequests: 8, pageSize: 8 }
  const plain = await engineOf(t, root, options)
  const guessing = await engineOf(t, root, {
    ...options,
    speculative: 'siblings',
    speculativeNumDraftTokens: 40,
    disableAdaptiveSpeculation: true
  })
  for (let round = 0; round < 4; round++) {
    t.strictSame(await outputs(guessing, samples(false)), await outputs(plain, samples(false)))
  }
  t.ok(guessing.stats.acceptedTokens > 20, `${guessing.stats.acceptedTokens} guesses were right`)
})

t.test('options that cannot be followed are refused', async t => {
  const root = t.testdir()
  writeModelFolder(root, tinyConfig('Qwen3ForCausalLM'), { values: randomValues(1) })
  await t.rejects(createEngine(root, { speculative: 'eagle' as 'off' }), {
    code: 'CONFIG',
    message: 'speculative: expected "off" or "siblings", got "eagle"'
  })
  await t.rejects(createEngine(root, { speculative: 'siblings', speculativeNumDraftTokens: 0 }), {
    code: 'CONFIG',
    message: 'speculativeNumDraftTokens: expected a whole number from 1, got 0'
  })
})
