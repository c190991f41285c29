import t from 'tap'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { createEngine } from '../../src/app/create-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { writeModelFolder } from '../helpers/make-checkpoint.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

t.test('payloads are hashed and unpacked while a step runs, not between two', async t => {
  const folder = t.testdir()
  writeModelFolder(folder, tinyConfig('Qwen3ForCausalLM'))
  const engine = await createEngine(folder, { threads: 1, maxTotalTokens: 512 })
  t.teardown(async () => {
    native().armFault!(null)
    await engine.close()
  })
  const seen = { tokens: 0 }
  native().armFault!({ point: 'step', at: 4, action: 'stall', stallMs: 600_000 })
  const running = rollout(engine, rolloutRequest([3, 4, 5], { maxNewTokens: 400 }), () => {
    seen.tokens++
  })
  while (native().faultPending!() || seen.tokens < 3) await sleep(1) // Waits until a step occupies the device.
  const before = seen.tokens
  const data = Uint8Array.from({ length: 1 << 16 }, (_, i) => (i * 7) & 255)
  // Each of these calls would have to wait for a step.
  for (let i = 0; i < 20; i++) {
    await engine.deltaHost.hash(data, null)
    await t.rejects(engine.deltaHost.unpack(data, new Uint8Array(32), new Uint8Array(8)), /BLAKE2b/)
  }
  t.equal(seen.tokens, before, 'no token has come meanwhile')
  native().armFault!(null)
  await running
  t.ok(seen.tokens > before)
})
