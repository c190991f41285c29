import t from 'tap'
import type { Test } from 'tap'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { goldenRoot, readGolden } from '../helpers/goldens.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { prompt, rollout, rolloutRequest } from '../helpers/rollout.ts'
import type { Rollout } from '../helpers/rollout.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// The experts that each token was routed to, through the whole engine. They are those that transformers chooses, and
// they are the same however the work is split, ordered or batched.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const SHARED = prompt(50, 40, 320)
const PROMPTS = [...[5, 40, 17, 64, 33, 1, 90].map((length, i) => prompt(i, length, 320)), [...SHARED, 7], [
  ...SHARED,
  9,
  11
]]

async function engineOf (t: Test, model: string, options: EngineOptions): Promise<LocalEngine> {
  const engine = await createEngine(model, {
    threads: 1,
    maxTotalTokens: 4096,
    enableReturnRoutedExperts: true,
    ...options
  })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

async function routed (engine: LocalEngine, ids: number[], sampling: object = {}, expertsFrom = 0): Promise<Rollout> {
  return await rollout(engine, { ...rolloutRequest(ids, sampling), expertsFrom })
}

const expertsOf = ({ last }: Rollout): number[] => Array.from(last.experts!)
const visible = (done: Rollout): object => ({ tokens: done.tokens, experts: expertsOf(done) })

for (const name of ['qwen3-moe', 'qwen3-moe-step2']) {
  const { folder, cases } = readGolden(name)
  for (const tp of [1, 2, 4]) {
    t.test(`${name} on ${tp} ranks: experts are those that transformers chooses, best first`, async t => {
      const engine = await engineOf(t, folder, { dtype: 'float32', tp })
      const { sparse, perToken } = engine.info.experts!
      const width = sparse.length * perToken
      for (const { prompt, greedy, experts } of cases) {
        const all = Array.from(experts!)
        t.equal(all.length, (prompt.length + greedy.length) * width)
        const made = await routed(engine, prompt, { maxNewTokens: greedy.length, temperature: 0 })
        t.same(made.tokens, greedy)
        t.same(expertsOf(made), all.slice(0, -width), 'prefill and decode, all tokens but the last')
        const scored = await routed(engine, [...prompt, ...greedy], { maxNewTokens: 0 })
        t.same(expertsOf(scored), all.slice(0, -width), 'one prefill')
        const turn = await routed(engine, [...prompt, ...greedy], { maxNewTokens: 1 }, prompt.length)
        t.same(
          expertsOf(turn),
          all.slice(prompt.length * width),
          'from a later position on, with the last token, which is of the prompt now'
        )
      }
    })
  }
}

for (const dtype of ['float32', 'bfloat16'] as const) {
  t.test(
    `in ${dtype}: alone, batched, chunked, cached, retracted and on two threads, ` +
      'the experts are the same',
    async t => {
      const folder = join(goldenRoot, 'qwen3-moe')
      const alone: Rollout[] = []
      for (const ids of PROMPTS) {
        const engine = await createEngine(folder, {
          threads: 1,
          maxTotalTokens: 4096,
          dtype,
          enableReturnRoutedExperts: true
        })
        alone.push(await routed(engine, ids))
        await engine.close()
      }
      const expected = alone.map(visible)
      const together = async (engine: LocalEngine): Promise<Rollout[]> =>
        await Promise.all(PROMPTS.map(async ids => await routed(engine, ids)))
      for (const [i, { tokens, last }] of alone.entries()) {
        t.equal(
          last.experts!.length,
          (PROMPTS[i]!.length + tokens.length - 1) * 4
        )
      }

      const plain = await engineOf(t, folder, { dtype })
      t.same((await together(plain)).map(visible), expected, 'batched')
      const warm = await together(plain)
      t.ok(warm[6]!.last.cachedTokens >= 80, 'the prefix was cached')
      t.same(warm.map(visible), expected, 'prefix hits')

      const chunked = await engineOf(t, folder, { dtype, maxPrefillTokens: 16, maxRunningRequests: 3 })
      t.same((await together(chunked)).map(visible), expected, 'prefill in chunks of a page')

      const small = await engineOf(t, folder, { dtype, maxTotalTokens: 208 })
      await small.pause('in_place') // All requests are queued before the first step is scheduled.
      const squeezing = together(small)
      await small.resume()
      const squeezed = await squeezing
      t.same(squeezed.map(visible), expected, 'too few pages for all')
      t.ok(squeezed.some(({ last }) => last.retractions > 0), 'some were retracted')

      const threads = await engineOf(t, folder, { dtype, threads: 2 })
      t.same((await together(threads)).map(visible), expected, 'two threads')
    }
  )
}

t.test(
  'aborted requests report the experts of their tokens, also from the queue ' +
    'that they were retracted to',
  async t => {
    const engine = await engineOf(t, join(goldenRoot, 'qwen3-moe'), {})
    const whole = await routed(engine, PROMPTS[3]!, { maxNewTokens: 200 })
    for (const mode of ['retract', 'in_place'] as const) {
      let isPaused = false
      const hurry = slowSteps(t, 20)
      const ended = await rollout(
        engine,
        { ...rolloutRequest(PROMPTS[3]!, { maxNewTokens: 200 }), expertsFrom: 0 },
        event => {
          if (isPaused || event.completionTokens < 20) return
          isPaused = true
          engine.pause(mode).then(() => engine.abortAll(), error => {
            t.error(error)
          })
        }
      )
      hurry()
      await engine.resume()
      t.equal(ended.last.finish!.type, 'abort')
      const rows = PROMPTS[3]!.length + ended.tokens.length - 1
      t.ok(ended.tokens.length >= 20 && ended.tokens.length < 200)
      t.same(expertsOf(ended), expertsOf(whole).slice(0, rows * 4), mode)
    }
    await engine.pause('in_place')
    const queued = routed(engine, PROMPTS[4]!)
    while (engine.stats.queued === 0) {
      await new Promise(resolve => {
        setImmediate(resolve)
      })
    }
    engine.abortAll()
    t.equal((await queued).last.experts, undefined, 'nothing was computed of it')
    await engine.resume()
  }
)

t.test('after an update experts are those of the new weights, not of the cache', async t => {
  const root = mkdtempSync(join(tmpdir(), 'refit-experts-'))
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const folders = ['a', 'b'].map((name, i) => {
    const folder = join(root, name)
    writeModelFolder(folder, tinyConfig('Qwen3MoeForCausalLM'), { values: randomValues(i + 1), shards: 1 })
    return folder
  })
  const engine = await engineOf(t, folders[0]!, {})
  const vocabulary = engine.info.vocabSize
  const ids = prompt(3, 60, vocabulary)
  const fresh = await engineOf(t, folders[1]!, {})
  const old = await routed(engine, ids, { maxNewTokens: 0 })
  const expected = await routed(fresh, ids, { maxNewTokens: 0 })
  t.notSame(expertsOf(old), expertsOf(expected), 'two different models')
  const source = await openDiskSource(folders[1]!, { roots: [root] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ version: 'b', flushCache: false })
  await source.close()
  t.same(expertsOf(await routed(engine, ids, { maxNewTokens: 0 })), expertsOf(expected))
})

t.test('experts that are not recorded are refused, at the start and by request', async t => {
  await t.rejects(
    createEngine(join(goldenRoot, 'qwen3'), { threads: 1, maxTotalTokens: 64, enableReturnRoutedExperts: true }),
    {
      code: 'CONFIG',
      param: 'enable-return-routed-experts',
      message: /Qwen3ForCausalLM has no experts that tokens could be routed to/
    }
  )
  const engine = await engineOf(t, join(goldenRoot, 'qwen3-moe'), { enableReturnRoutedExperts: false })
  t.equal(engine.info.experts, undefined)
  await t.rejects(routed(engine, [5, 6, 7]), { code: 'UNSUPPORTED', message: /does not record which experts/ })
  const recording = await engineOf(t, join(goldenRoot, 'qwen3-moe'), {})
  t.same(recording.info.experts, { layers: 3, sparse: [0, 2], experts: 8, perToken: 2 })
  await t.rejects(routed(recording, [5, 6, 7], {}, 4), {
    code: 'INVALID_REQUEST',
    message: /routed_experts_start_len is 4; expected 0 to the prompt's 3 tokens/
  })
  t.equal(
    (await routed(recording, [5, 6, 7], { maxNewTokens: 1 }, 3)).last.experts!.length,
    0,
    'from the end of the prompt on, and one token: none has been computed'
  )
  t.equal((await rollout(recording, rolloutRequest([5, 6, 7]))).last.experts, undefined, 'not asked for')
})
