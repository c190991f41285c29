import t from 'tap'
import assert from 'node:assert/strict'
import { setImmediate as turn } from 'node:timers/promises'
import fc from 'fast-check'
import { storeOf } from '../helpers/core.ts'
import { ManualClock } from '../helpers/manual-clock.ts'
import { codedChecksum, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { RefitError } from '../../src/errors.ts'
import type { WeightSource } from '../../src/contract/weight-source.ts'
import type { Open } from './transaction-model.ts'
import { addon, ALL, DEADLINE_MS, Model } from './transaction-model.ts'

// Random programs on a real store and on a small model of it. They compare which calls are admitted, the results, the
// bytes, the torn tensors, the label, and whether generation is possible.

const owner = fc.constantFrom('a', 'b')
const names = fc.subarray(ALL, { minLength: 1 })
const variant = fc.integer({ min: 1, max: 3 })
const version = fc.option(fc.constantFrom('v1', 'v2', 'v3'), { nil: undefined })
/**
 * The transaction that an update names: none, the open one, the last one that was opened, or one that never existed.
 */
const ticket = fc.constantFrom('none', 'none', 'open', 'open', 'last', 'wrong')
const command = fc.oneof(
  { weight: 3, arbitrary: fc.record({ do: fc.constant('begin' as const), version }) },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constant('open' as const),
      owner,
      version,
      expected: fc.option(fc.oneof(fc.constant('all' as const), names), { nil: undefined })
    })
  },
  { weight: 8, arbitrary: fc.record({ do: fc.constant('write' as const), ticket, names, variant, version }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant('tear' as const), ticket, names, variant }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('refuse' as const), ticket, names, variant }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('both' as const), ticket, variant }) },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constant('commit' as const),
      ticket: fc.constantFrom('open', 'last', 'wrong'),
      version
    })
  },
  { weight: 3, arbitrary: fc.record({ do: fc.constant('end' as const), version }) },
  {
    weight: 2,
    arbitrary: fc.record({ do: fc.constant('abort' as const), ticket: fc.constantFrom('open', 'last', 'wrong') })
  },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('wait' as const), ms: fc.integer({ min: 1, max: 12_000 }) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('label' as const), version: fc.constantFrom('x', 'y') }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('pause' as const), on: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('memory' as const) }) }
)
type Command = typeof command extends fc.Arbitrary<infer C> ? C : never

async function code (run: () => Promise<unknown>): Promise<string | null> {
  return await run().then(() => null, (error: unknown) => {
    if (error instanceof RefitError) return error.code
    throw error
  })
}

t.test('the store behaves as its model in every random program of updates and transactions', async t => {
  const counts = new Map<string, number>()
  await fc.assert(
    fc.asyncProperty(fc.array(command, { minLength: 5, maxLength: 30 }), async program => {
      const clock = new ManualClock()
      const { store, table, gates, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2, 'bfloat16', {
        clock,
        deadlineMs: DEADLINE_MS
      })
      const model = new Model()
      const send = async (source: WeightSource, id: string | undefined, version: string | undefined): Promise<void> => {
        const update = await store.update(id === undefined ? {} : { transaction: id })
        try {
          await update.write(source)
          await update.commit({ flushCache: true, allowTorn: true, ...version === undefined ? {} : { version } })
        } catch (error) {
          await update.abort('it failed')
          throw error
        }
      }
      const idOf = (ticket: string): string | undefined =>
        ticket === 'none' ? undefined : ticket === 'wrong' ? 'wrong' : ticket === 'open' ? model.open?.id : model.last
      const opened = (
        id: string,
        { owner, scope, expected, version }: Pick<Open, 'owner' | 'scope' | 'version'> & {
          expected: 'all' | readonly string[] | undefined
        }
      ): void => {
        if (model.open !== null) model.end('aborted')
        model.open = {
          id,
          owner,
          scope,
          expected: expected === undefined ? null : new Set(expected === 'all' ? ALL : expected),
          written: new Set(),
          failed: new Set(),
          touched: false,
          version,
          until: model.now + DEADLINE_MS
        }
        model.last = id
        if (!model.paused) model.since = new Set()
      }

      const step = async (step: Command): Promise<void> => {
        let got: string | null = null
        let expected: string | null = null
        if (step.do === 'begin' || step.do === 'open') {
          const scope = step.do === 'begin'
          const { owner, expected: required } = scope
            ? { owner: 'trainer', expected: undefined }
            : step as Extract<Command, { do: 'open' }>
          const isOwn = model.open === null || (model.open.scope === scope && (scope || model.open.owner === owner))
          expected = isOwn ? null : 'TRANSACTION_OPEN'
          got = await code(async () => {
            const status = await store.transactions.open({
              owner,
              scope,
              ...required === undefined ? {} : { expected: required },
              ...step.version === undefined
                ? {}
                : { version: step.version }
            })
            opened(status.id, { owner, scope, expected: required, version: step.version })
          })
        } else if (step.do === 'write' || step.do === 'tear' || step.do === 'refuse') {
          const id = idOf(step.ticket)
          const version = step.do === 'write' ? step.version : undefined
          let source = memorySource(table, step.names, step.variant)
          let calls = 0
          if (step.do === 'tear') {
            source = {
              ...source,
              verify: async () => {
                if (++calls === 2) throw new RefitError('CHECKPOINT_CHANGED', 'it moved')
              }
            }
          }
          if (step.do === 'refuse') {
            source = { ...source, tensors: [...source.tensors, { ...source.tensors[0]!, name: 'model.strange' }] }
          }
          expected = model.door(id) ?? (step
              .do === 'write'
            ? null
            : step.do === 'tear'
            ? 'WEIGHTS_TORN'
            : 'WEIGHTS_UNKNOWN_NAME')
          got = await code(async () => {
            await send(source, id, version)
          })
          if (model.door(id) === null) {
            if (step.do === 'refuse') {
              for (const name of step.names) model.open?.failed.add(name)
              model.renewDeadline()
            } else model.markWritten(step.names, step.do === 'write' ? step.variant : null)
            if (version !== undefined) {
              if (model.open !== null) model.open.version = version
              else model.label = version
            }
          }
        } else if (step.do === 'both') {
          const id = idOf(step.ticket)
          const halves = [ALL.slice(0, 9), ALL.slice(9)]
          const codes = await Promise.all(halves.map(async half =>
            await code(async () => {
              await send(memorySource(table, half, step.variant), id, undefined)
            })
          ))
          expected = model.door(id)
          assert.equal(codes[0], codes[1])
          got = codes[0]!
          if (expected === null) model.markWritten(ALL, step.variant)
        } else if (step.do === 'commit') {
          const id = idOf(step.ticket) ?? 'wrong'
          const options = step.version === undefined ? {} : { version: step.version }
          got = await code(async () => await store.transactions.commit(id, options))
          expected = model.open?.id === id
            ? model.commit(step.version)
            : model.ended.get(id) === 'committed'
            ? null
            : model.ended.has(id)
            ? 'TRANSACTION_ENDED'
            : 'NOT_FOUND'
        } else if (step.do === 'end') {
          got = await code(async () =>
            await store.transactions.commit(null, step.version === undefined ? {} : { version: step.version })
          )
          if (model.open !== null) expected = model.open.scope ? model.commit(step.version) : 'TRANSACTION_OPEN'
          else expected = model.lastScope === 'aborted' ? 'TRANSACTION_ENDED' : null
        } else if (step.do === 'abort') {
          const id = idOf(step.ticket) ?? 'wrong'
          let outcome: unknown
          got = await code(async () => {
            outcome = (await store.transactions.abort(id, 'on request')).outcome
          })
          if (model.open?.id === id) assert.equal(outcome, model.end('aborted'))
          else {expected = model.ended.get(id) === 'aborted'
              ? null
              : model.ended.has(id)
              ? 'TRANSACTION_ENDED'
              : 'NOT_FOUND'}
        } else if (step.do === 'wait') {
          clock.advance(step.ms)
          await turn()
          model.wait(step.ms)
        } else if (step.do === 'label') {
          got = await code(async () => store.label(step.version))
          if (model.open === null) model.label = step.version
          else if (model.open.scope) model.open.version = step.version
          else expected = 'TRANSACTION_OPEN'
        } else if (step.do === 'pause') {
          store.paused(step.on)
          if (step.on && !model.paused) model.since = new Set()
          model.paused = step.on
        } else {
          got = await code(async () => {
            await store.release(['kv_cache'])
            await store.resume(['kv_cache'])
          })
          if (model.open !== null) expected = 'TRANSACTION_OPEN'
        }
        assert.equal(got, expected, step.do)
        counts.set(`${step.do} ${got ?? 'ok'}`, (counts.get(`${step.do} ${got ?? 'ok'}`) ?? 0) + 1)
      }

      const compare = (): void => {
        const torn = ALL.filter(name => model.values.get(name) === null).sort()
        const { state } = store
        assert.deepEqual(state.state === 'torn' ? state.tensors : [], torn)
        assert.equal(store.weightVersion, model.label)
        const { current } = store.transactions
        assert.equal(current?.id, model.open?.id)
        const isShut = gates.shutCount - gates.openCount
        // A gate that passes to a new transaction stays shut before the transaction's first write.
        if (model.open === null) assert.equal(isShut, 0)
        else {
          if (model.open.touched) assert.equal(isShut, 1, 'nothing may be generated')
          assert.equal(current!.writing, isShut === 1)
          assert.equal(current!.written, model.open.written.size)
          assert.deepEqual(new Set(current!.failed), model.open.failed)
          assert.equal(current!.version, model.open.version ?? null)
          assert.equal(
            current!.missingCount,
            [...model.open.expected ?? ALL].filter(name => !model.open!.written.has(name)).length
          )
          assert.equal(current!.secondsLeft, (model.open.until - model.now) / 1000)
        }
        if (isShut === 0) {
          assert.equal(gates.last!.torn !== null, torn.length > 0, 'the state that the scheduler got last')
          assert.ok(gates.last!.epoch === store.epoch)
        }
        if (store.lastCoverage !== null) {
          assert.equal(
            store.lastCoverage.missingCount,
            ALL.filter(name => !model.since!.has(name) || model.values.get(name) === null).length
          )
        }
      }

      const holds = async (): Promise<void> => {
        for (const { name, checksum } of (await store.checksums()).tensors) {
          const value = model.values.get(name)!
          if (value !== null) assert.equal(checksum, codedChecksum(table, name, value), name)
        }
      }

      try {
        await send(memorySource(table, ALL, 1), undefined, undefined)
        for (const one of program) {
          await step(one)
          compare()
        }
        await holds()
        await store.close()
        if (model.open !== null) model.end('aborted')
        compare()
        await send(memorySource(table, ALL, 2), undefined, undefined)
        model.markWritten(ALL, 2)
        compare()
        await holds()
        assert.equal(clock.armed, 0)
      } finally {
        await store.close()
        close()
      }
    }),
    { numRuns: 400 }
  )
  // The programs reached all the cases that they are meant for.
  for (
    const reached of [
      'begin ok',
      'begin TRANSACTION_OPEN',
      'open ok',
      'open TRANSACTION_OPEN',
      'write ok',
      'write TRANSACTION_OPEN',
      'write TRANSACTION_ENDED',
      'write NOT_FOUND',
      'tear WEIGHTS_TORN',
      'refuse WEIGHTS_UNKNOWN_NAME',
      'commit ok',
      'commit TRANSACTION_INCOMPLETE',
      'commit TRANSACTION_ENDED',
      'end ok',
      'end TRANSACTION_INCOMPLETE',
      'end TRANSACTION_OPEN',
      'end TRANSACTION_ENDED',
      'abort ok',
      'memory ok',
      'memory TRANSACTION_OPEN',
      'label TRANSACTION_OPEN',
      'both ok'
    ]
  ) {
    t.ok((counts.get(reached) ?? 0) > 0, `${reached}: ${counts.get(reached) ?? 0}`)
  }
})
