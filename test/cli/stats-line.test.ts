import t from 'tap'
import { setTimeout as sleep } from 'node:timers/promises'
import { logStats, statsLine } from '../../src/cli/stats-line.ts'
import type { EngineStats } from '../../src/contract/rollout-engine.ts'

const idle: EngineStats = {
  running: 0,
  queued: 0,
  paused: null,
  pausing: false,
  onOldWeights: 0,
  usedTokens: 0,
  cachedTokens: 0,
  totalTokens: 1000,
  promptTokens: 100,
  generationTokens: 50,
  prefixHitTokens: 10,
  drafts: 0,
  draftTokens: 0,
  acceptedTokens: 0,
  retractions: 0,
  steps: 5,
  stepMs: 1,
  tokensPerSecond: 0
}

t.test('the line shows the changes between two readings, per second', async t => {
  const after = {
    ...idle,
    running: 3,
    queued: 2,
    usedTokens: 250,
    promptTokens: 500,
    generationTokens: 250,
    prefixHitTokens: 110,
    drafts: 0,
    draftTokens: 0,
    acceptedTokens: 0,
    retractions: 1
  }
  const [fields, line] = statsLine(idle, after, 10)
  t.same(fields, {
    running: 3,
    queued: 2,
    generatedPerSecond: 20,
    promptPerSecond: 40,
    kvUsedPercent: 25,
    prefixHitPercent: 25,
    retractions: 1,
    draftTokens: 0,
    acceptedTokens: 0
  })
  t.equal(line, '3 running, 2 queued, 20 tok/s generated, 40 tok/s of prompts, KV cache 25 % used, prefix hits 25 %')
  t.match(statsLine(idle, { ...after, paused: 'in_place' }, 10)[1], /paused \(in_place\)$/)
  const before = { ...idle, draftTokens: 5, acceptedTokens: 2 }
  const guessed = statsLine(before, { ...after, draftTokens: 12, acceptedTokens: 5 }, 10)
  t.match(guessed[1], / %, 3 of 7 guessed tokens right$/)
})

t.test('nothing is logged while the engine idles, and a short burst is not missed', async t => {
  const engine = { stats: idle }
  const lines: string[] = []
  let told: () => void = () => {}
  const stop = logStats(engine, (_fields, line) => {
    lines.push(line)
    told()
  }, 5)
  await sleep(30)
  t.same(lines, [])
  const burst = new Promise<void>(resolve => {
    told = resolve
  })
  engine.stats = { ...idle, steps: 6 }
  // The timer does not keep the process alive.
  const alive = setInterval(() => {}, 1000)
  await burst
  clearInterval(alive)
  stop()
  t.equal(lines.length, 1)
})
