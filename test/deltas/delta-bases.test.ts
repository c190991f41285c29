import t from 'tap'
import { RefitError } from '../../src/errors.ts'
import { DeltaBases } from '../../src/sources/tensor/delta-bases.ts'

// The order in which deltas are let in, over many failures: test/deltas/lost-bases.test.ts sends them to a server.

/** Weights of one tensor whose updates come into use at once, or with their transaction. */
class Weights {
  #epoch = 0
  #writtenAt = 0
  #transaction: string | null = null
  readonly #bases = new DeltaBases({
    epoch: () => this.#epoch,
    writtenAt: () => this.#writtenAt,
    transaction: () => this.#transaction
  })

  /** The outcome of sending a delta: its update succeeds, fails, or is refused. */
  send (id: string, fails = false, isWhole = false): 'written' | 'failed' | 'refused' {
    try {
      const hooks = this.#bases.begin(['w'], id, isWhole)
      if (!fails) {
        hooks.accept({ transaction: this.#transaction } as Parameters<typeof hooks.accept>[0])
        if (this.#transaction === null) this.#writtenAt = ++this.#epoch
      }
      hooks.closed()
      if (fails) hooks.explain(new RefitError('INTERNAL', 'a fault'))
      return fails ? 'failed' : 'written'
    } catch (error) {
      if (error instanceof RefitError && error.statusCode === 409) return 'refused'
      throw error
    }
  }

  /** Sends deltas within a transaction that is aborted. */
  abort (transaction: string, ...ids: string[]): Array<ReturnType<Weights['send']>> {
    this.#transaction = transaction
    const outcomes = ids.map(id => this.send(id))
    this.#transaction = null
    return outcomes
  }
}

t.test('a lost delta that fails again keeps its place before those that were refused', async t => {
  const weights = new Weights()
  t.equal(weights.send('a', true), 'failed')
  for (let i = 0; i < 3; i++) {
    t.equal(weights.send('b'), 'refused')
    t.equal(weights.send('a', true), 'failed')
  }
  t.equal(weights.send('b'), 'refused')
  t.equal(weights.send('a'), 'written')
  t.equal(weights.send('c'), 'refused', 'b is lost still')
  t.equal(weights.send('b'), 'written')
  t.equal(weights.send('c'), 'written')
  t.equal(weights.send('d'), 'written')
})

t.test('deltas of two aborted transactions are lost in their order', async t => {
  const weights = new Weights()
  t.same(weights.abort('one', 'a', 'b'), ['written', 'written'])
  t.equal(weights.send('c'), 'refused')
  t.same(weights.abort('two', 'a', 'b'), ['written', 'written'])
  t.equal(weights.send('c'), 'refused')
  t.equal(weights.send('b'), 'refused')
  for (const id of ['a', 'b', 'c', 'd']) t.equal(weights.send(id), 'written', id)
})

t.test('more lost deltas than are kept let none in but a whole tensor', async t => {
  const weights = new Weights()
  t.equal(weights.send('first', true), 'failed')
  for (let i = 0; i < 200; i++) t.equal(weights.send(`later ${i}`), 'refused')
  t.equal(weights.send('first'), 'refused', 'it cannot be repeated any more')
  t.equal(weights.send('whole', true, true), 'failed')
  t.equal(weights.send('delta'), 'refused')
  t.equal(weights.send('whole', false, true), 'written')
  t.equal(weights.send('delta'), 'written')
})
