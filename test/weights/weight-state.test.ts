import t from 'tap'
import fc from 'fast-check'
import { WeightLedger } from '../../src/weights/weight-state.ts'

const NAMES = ['a', 'b', 'c', 'd', 'e']

t.test('a new ledger is torn until every name has been written', async t => {
  const ledger = new WeightLedger(NAMES, 'v0')
  t.match(ledger.tornReason, /no weights have been loaded.*a, b, c and 2 more/)
  ledger.markWritten(['a', 'b', 'c', 'd'])
  t.same(ledger.state, { state: 'torn', tensors: ['e'], reason: 'no weights have been loaded' })
  ledger.markWritten(['e'])
  t.same(ledger.state, { state: 'current' })
  t.equal(ledger.tornReason, null)
})

t.test('only writes after an epoch count as written since it', async t => {
  const ledger = new WeightLedger(NAMES, 'v0')
  ledger.markWritten(NAMES)
  const { epoch } = ledger
  t.same(ledger.notWrittenSince(epoch), NAMES, 'the write at that epoch came before')
  ledger.markWritten(['a', 'c'])
  t.same(ledger.notWrittenSince(epoch), ['b', 'd', 'e'])
  ledger.markTorn(['b'], ['c'], 'cut')
  t.same(ledger.notWrittenSince(epoch), ['c', 'd', 'e'], 'a torn one is not written')
  t.same(ledger.notWrittenSince(epoch - 1), ['c'])
  t.same(ledger.notWrittenSince(ledger.epoch), NAMES)
})

t.test('random programs agree with a reference that keeps one flag per name', async () => {
  const names = fc.subarray(NAMES)
  const command = fc.oneof(
    fc.record({ do: fc.constant('wrote' as const), names }),
    fc.record({ do: fc.constant('tore' as const), names, cut: fc.nat({ max: 5 }) }),
    fc.record({ do: fc.constant('label' as const), version: fc.string() })
  )
  fc.assert(
    fc.property(fc.array(command, { maxLength: 40 }), program => {
      const ledger = new WeightLedger(NAMES, 'v0')
      const torn = new Map(NAMES.map(name => [name, true]))
      const at = new Map<string, number>()
      let epoch = 0
      let version = 'v0'
      for (const step of program) {
        if (step.do === 'label') {
          ledger.label(version = step.version)
        } else {
          epoch++
          const whole = step.do === 'wrote' ? step.names : step.names.slice(0, step.cut)
          const rest = step.do === 'wrote' ? [] : step.names.slice(step.cut)
          if (step.do === 'wrote') ledger.markWritten(whole)
          else ledger.markTorn(whole, rest, 'cut')
          for (const name of whole) {
            torn.set(name, false)
            at.set(name, epoch)
          }
          for (const name of rest) torn.set(name, true)
        }
        const expected = NAMES.filter(name => torn.get(name))
        const state = ledger.state
        if (JSON.stringify(state.state === 'torn' ? state.tensors : []) !== JSON.stringify(expected)) return false
        if (ledger.epoch !== epoch || ledger.version !== version || ledger.torn !== (expected.length > 0)) return false
        if ((ledger.tornReason === null) !== (expected.length === 0)) return false
        if (NAMES.some(name => ledger.writtenAt(name) !== (at.get(name) ?? 0))) return false
      }
      return true
    }),
    { numRuns: 500 }
  )
})

t.test('the asleep state hides torn tensors and keeps them; weights without a copy are torn on resume', async () => {
  const tag = fc.constantFrom('weights' as const, 'kv_cache' as const, 'cuda_graph' as const)
  const command = fc.oneof(
    fc.record({ do: fc.constant('wrote' as const), names: fc.subarray(NAMES) }),
    fc.record({ do: fc.constant('tore' as const), names: fc.subarray(NAMES) }),
    fc.record({ do: fc.constant('slept' as const), tag, bytes: fc.nat() }),
    fc.record({ do: fc.constant('woke' as const), tag, kept: fc.boolean() })
  )
  fc.assert(
    fc.property(fc.array(command, { maxLength: 40 }), program => {
      const ledger = new WeightLedger(NAMES, 'v0')
      const torn = new Set(NAMES)
      const released = new Map<string, number>()
      let epoch = 0
      for (const step of program) {
        const gone = released.has('weights')
        if (step.do === 'wrote' && !gone) {
          ledger.markWritten(step.names)
          for (const name of step.names) torn.delete(name)
          epoch++
        } else if (step.do === 'tore' && !gone) {
          ledger.markTorn([], step.names, 'cut')
          for (const name of step.names) torn.add(name)
          epoch++
        } else if (step.do === 'slept') {
          ledger.markReleased(step.tag, step.bytes)
          released.set(step.tag, step.bytes)
        } else if (step.do === 'woke' && released.delete(step.tag)) {
          ledger.markResumed(step.tag, step.kept)
          if (step.tag === 'weights' && !step.kept) {
            for (const name of NAMES) torn.add(name)
            epoch++
          }
        }
        const isTorn = torn.size > 0 && !released.has('weights')
        const { state } = ledger
        if (state.state !== (isTorn ? 'torn' : released.size > 0 ? 'asleep' : 'current')) return false
        if (state.state === 'torn' && state.tensors.join() !== NAMES.filter(name => torn.has(name)).join()) return false
        if (state.state === 'asleep' && [...state.tags].sort().join() !== [...released.keys()].sort().join()) {
          return false
        }
        if (JSON.stringify(Object.entries(ledger.released).sort()) !== JSON.stringify([...released].sort())) {
          return false
        }
        const opening = ledger.opening(true)
        if (
          (opening.torn !== null) !== isTorn || (opening.asleep !== null) !== (released.size > 0) ||
          opening.epoch !== epoch
        ) return false
      }
      return true
    }),
    { numRuns: 500 }
  )
})
