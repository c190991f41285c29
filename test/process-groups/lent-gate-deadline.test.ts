import { join } from 'node:path'
import { setImmediate as turn } from 'node:timers/promises'
import t from 'tap'
import type { Test } from 'tap'
import { LentGate } from '../../src/process-groups/lent-gate.ts'
import { packageRoot } from '../../src/root.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { serve } from '../helpers/transaction-server.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// A request waits for the gate, which an update has, and its deadline passes before, while or after the update lends
// the gate to it.

/** An engine whose gate is shut by an update in place, and a gate on it whose requests have this deadline. */
async function shutEngine (t: Test, deadlineMs: number) {
  const { engine, folder } = await serve(t)
  const source = await openDiskSource(join(folder, 'trained'), { roots: [folder] })
  const update = await engine.update()
  await update.write(source)
  await source.close()
  /** Resolves with the error of the first request that gets no gate. */
  let refused = (_error: unknown): void => {}
  const refusal = new Promise<unknown>(resolve => {
    refused = resolve
  })
  const gate = new LentGate(async run => {
    await engine.groupHost.runBetweenSteps(run, deadlineMs).catch((error: unknown) => {
      refused(error)
      throw error
    })
  })
  return { engine, update, gate, refusal }
}

t.test('a deadline that passes while the gate is lent ends neither the guest nor its caller', async t => {
  for (const fails of [false, true]) {
    const { engine, update, gate, refusal } = await shutEngine(t, 100)
    let runs = 0
    let end = (): void => {}
    const ended = new Promise<void>(resolve => {
      end = resolve
    })
    const guest = gate.use(async () => {
      runs++
      await ended
      if (fails) throw new Error('no connection')
    })
    let isLent = true
    const lending = gate.lend(async () => {}).then(() => {
      isLent = false
    })
    t.match(await refusal, { code: 'DEADLINE' })
    t.ok(isLent, 'the guest runs on with the gate')
    end()
    if (fails) await t.rejects(guest, { message: 'no connection' })
    else await guest
    await lending
    await update.commit({ version: 'done' })
    t.equal(runs, 1)
    // The gate is open, and nobody waits for it.
    await gate.use(async () => {
      runs++
    })
    t.equal(runs, 2)
    t.match(engine, { weightVersion: 'done', ready: true })
  }
})

t.test('a request whose deadline has passed is no guest of a lender that comes later', async t => {
  const { engine, update, gate } = await shutEngine(t, 50)
  let runs = 0
  const run = async (): Promise<void> => {
    runs++
  }
  await t.rejects(gate.use(run), { code: 'DEADLINE' })
  await gate.lend(async () => {})
  t.equal(runs, 0)
  await update.commit({})
  await gate.use(run)
  t.equal(runs, 1)
  t.equal(engine.ready, true)
})

t.test('a request does not begin after its deadline, at whichever turn the gate is lent', async t => {
  for (let turns = 0; turns < 12; turns++) {
    let refuse = (_error: Error): void => {}
    const gate = new LentGate(async () => {
      await new Promise<void>((_resolve, reject) => {
        refuse = reject
      })
    })
    let runs = 0
    const outcome = gate
      .use(async () => {
        runs++
        await turn()
      })
      .then(() => 'ran', () => 'refused')
    await Promise.resolve()
    refuse(new Error('late'))
    for (let i = 0; i < turns; i++) await Promise.resolve()
    await gate.lend(async () => {})
    const got = await outcome
    t.equal(got, runs === 1 ? 'ran' : 'refused', `${runs} runs after ${turns} turns`)
  }
})
