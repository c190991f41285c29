import t from 'tap'
import type { Test } from 'tap'
import { cpSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { ARCHITECTURES } from '../../src/model/families.ts'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { prompt, rollout, rolloutRequest } from '../helpers/rollout.ts'
import type { Rollout } from '../helpers/rollout.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// An engine's results are the same bit for bit, however its work is split, ordered or batched. These tests run the
// whole engine.

const GOLDENS = join(packageRoot, 'test/goldens')
const PROMPTS = [5, 40, 17, 64, 33, 1, 90].map((length, i) => prompt(i, length, 320))

async function engineOf (t: Test, model: string, options: EngineOptions): Promise<LocalEngine> {
  const engine = await createEngine(model, { threads: 1, maxTotalTokens: 4096, ...options })
  t.teardown(async () => {
    await engine.close()
  })
  return engine
}

async function together (engine: LocalEngine): Promise<Rollout[]> {
  return await Promise.all(PROMPTS.map(async ids => await rollout(engine, rolloutRequest(ids, {}, { startLen: 0 }))))
}

/** Two models of one configuration with other weights. */
function twoModels (t: Test, architecture: typeof ARCHITECTURES[number]): { root: string, folders: string[] } {
  const root = mkdtempSync(join(tmpdir(), 'refit-two-models-'))
  t.teardown(() => {
    rmSync(root, { recursive: true })
  })
  const folders = ['a', 'b'].map((name, i) => {
    const folder = join(root, name)
    writeModelFolder(folder, tinyConfig(architecture), { values: randomValues(i + 1), shards: 1 + i })
    return folder
  })
  return { root, folders }
}

async function updateFrom (engine: LocalEngine, folder: string, root: string): Promise<void> {
  const source = await openDiskSource(folder, { roots: [root] })
  const update = await engine.update()
  await update.write(source)
  await update.commit({ version: folder })
  await source.close()
}

const visible = ({ tokens, logprobs, input }: Rollout): object => ({ tokens, logprobs, input })

for (const model of ['qwen2', 'qwen3', 'qwen3-moe', 'llama']) {
  for (const dtype of ['bfloat16', 'float32'] as const) {
    t.test(
      `${model} in ${dtype}: alone, batched, chunked, cached, retracted and on two ` +
        'threads, the bits are the same',
      async t => {
        const folder = join(GOLDENS, model)
        const plain = await engineOf(t, folder, { dtype })
        const alone: Rollout[] = []
        for (const ids of PROMPTS) alone.push(await rollout(plain, rolloutRequest(ids, {}, { startLen: 0 })))
        const expected = alone.map(visible)

        t.same((await together(plain)).map(visible), expected, 'batched, with a warm prefix cache')
        const warm = await rollout(plain, rolloutRequest(PROMPTS[6]!))
        t.ok(warm.last.cachedTokens >= 80, 'the prefix was cached')
        t.same(warm.tokens, alone[6]!.tokens, 'a prefix hit')
        t.same(warm.logprobs, alone[6]!.logprobs)

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

  t.test(`${model} in float32 gives equal logprobs on 1, 2 and 4 ranks, within rounding`, async t => {
    const folder = join(GOLDENS, model)
    const one = await engineOf(t, folder, { dtype: 'float32' })
    const ids = [...PROMPTS[3]!, ...(await rollout(one, rolloutRequest(PROMPTS[3]!))).tokens]
    const expected = await rollout(one, rolloutRequest(ids, { maxNewTokens: 0 }, { startLen: 0 }))
    for (const tp of [2, 4]) {
      const many = await engineOf(t, folder, { dtype: 'float32', tp })
      const got = await rollout(many, rolloutRequest(ids, { maxNewTokens: 0 }, { startLen: 0 }))
      const worst = Math.max(...got.input.slice(1).map((logprob, i) => Math.abs(logprob! - expected.input[i + 1]!)))
      t.ok(worst < 1e-4, `tp ${tp}: largest difference ${worst}`)
    }
  })
}

for (const architecture of ARCHITECTURES) {
  t.test(`${architecture}: an engine updated in place equals the engine loaded fresh, bit for bit`, async t => {
    const { root, folders } = twoModels(t, architecture)
    for (const tp of [1, 2]) {
      const fresh = await Promise.all(folders.map(async folder => {
        const engine = await createEngine(folder, { threads: 1, tp, maxTotalTokens: 4096 })
        const result = { rollouts: (await together(engine)).map(visible), checksums: await engine.checksums() }
        await engine.close()
        return result
      }))
      t.not(JSON.stringify(fresh[0]!.rollouts), JSON.stringify(fresh[1]!.rollouts), 'two different models')
      const engine = await engineOf(t, folders[0]!, { tp })
      for (const turn of [1, 0, 1]) {
        await updateFrom(engine, folders[turn]!, root)
        t.same(await engine.checksums(), fresh[turn]!.checksums)
        t.same((await together(engine)).map(visible), fresh[turn]!.rollouts, `tp ${tp}, model ${turn}`)
      }
    }
  })
}

for (const architecture of ARCHITECTURES) {
  t.test(`${architecture}: a deterministic engine has the same bits on any number of ranks`, async t => {
    const { root, folders } = twoModels(t, architecture)
    const one = await engineOf(t, folders[1]!, { tp: 1 })
    const expected = (await together(one)).map(visible)
    for (const tp of [2, 4]) {
      const engine = await engineOf(t, folders[0]!, { tp, deterministic: true })
      t.notSame((await together(engine)).map(visible), expected, 'another model')
      for (const turn of [1, 0, 1]) await updateFrom(engine, folders[turn]!, root)
      t.same((await together(engine)).map(visible), expected, `tp ${tp}, after updates in place`)
      t.same((await engine.checksums()).tensors, (await one.checksums()).tensors)
    }
  })
}

t.test(
  'tokens before and after an update in place are labelled with the weights that made them, and ' +
    'old KV is never hit by new requests',
  async t => {
    const root = mkdtempSync(join(tmpdir(), 'refit-inplace-'))
    t.teardown(() => {
      rmSync(root, { recursive: true })
    })
    cpSync(join(packageRoot, 'models/adder'), join(root, 'adder'), { recursive: true })
    cpSync(join(packageRoot, 'models/adder-base'), join(root, 'base'), { recursive: true })
    const fresh = await engineOf(t, join(root, 'adder'), {})
    const ids = prompt(9, 60, 250)
    const expected = await rollout(fresh, rolloutRequest(ids))

    const engine = await engineOf(t, join(root, 'base'), { weightVersion: 'old' })
    const hurry = slowSteps(t, 5)
    let paused: Promise<void> | undefined
    const running = rollout(engine, rolloutRequest(ids, { maxNewTokens: 400 }), event => {
      if (event.completionTokens < 5 || paused !== undefined) return
      paused = engine.pause('in_place').then(async () => {
        hurry()
        const source = await openDiskSource(join(root, 'adder'), { roots: [root] })
        const update = await engine.update()
        await update.write(source)
        await update.commit({ version: 'new', flushCache: false })
        await source.close()
        await engine.resume()
      })
    })
    const through = await running
    await paused
    t.equal(through.tokens.length, 400)
    const turn = through.versions.indexOf('new')
    t.ok(turn >= 5 && turn < 400, `the label moved at token ${turn}`)
    t.same(through.versions, through.versions.map((_, i) => i < turn ? 'old' : 'new'))
    const after = await rollout(engine, rolloutRequest(ids))
    t.equal(after.last.cachedTokens, 0, 'nothing of the old epoch was hit')
    t.same(visible(after), visible(expected))
  }
)
