import type { Mutant } from './mutant.ts'

export const peer: readonly Mutant[] = [
  {
    why: 'a load from a peer lets no request finish on the old weights',
    file: 'src/peer/weight-receiver.ts',
    before: '    ...options.onRunning === undefined ? {} : { onRunning: options.onRunning }\n',
    after: '',
    tests: ['test/peer/second-set.test.ts']
  },
  {
    why: 'a load in place from a peer ignores on_running',
    file: 'src/peer/weight-receiver.ts',
    before: 'chooseSet(store.shadow, { swap, onRunning, abortAllRequests: abort })',
    after: 'chooseSet(store.shadow, { swap })',
    tests: ['test/peer/second-set.test.ts']
  },
  {
    why: 'an update sent on to a remote engine lets no request finish on the old weights',
    file: 'src/remote/remote-update.ts',
    before: '        ...onRunning === undefined ? {} : { onRunning }\n',
    after: '',
    tests: ['test/remote/finish-old.test.ts']
  },
  {
    why: 'a contradiction opens a transaction on a remote engine first',
    file: 'src/remote/remote-update.ts',
    before: '      requireAgreement(this.#options)\n',
    after: '',
    tests: ['test/remote/finish-old.test.ts']
  },
  {
    why: 'checksums of received weights are not compared',
    file: 'src/peer/weight-receiver.ts',
    before: 'const wrong = own.filter(({ name, checksum }) => sent[name] !== checksum)',
    after: 'const wrong = own.filter(({ name }) => !(name in sent))',
    tests: ['test/peer/weight-receiver.test.ts', 'test/peer/peer.test.ts']
  },
  {
    why: 'a sender with more tensors counts as equal',
    file: 'src/peer/weight-receiver.ts',
    before: 'if (wrong.length === 0 && extra === 0) return',
    after: 'if (wrong.length === 0) return',
    tests: ['test/peer/weight-receiver.test.ts']
  },
  {
    why: 'weights that differ from the sent ones stay untorn',
    file: 'src/peer/weight-receiver.ts',
    before: `if (store.epoch !== epoch) {
      store.ledger.markAllTorn`,
    after: `if (store.epoch === epoch) {
      store.ledger.markAllTorn`,
    tests: [
      'test/e2e/update-from-peer.test.ts',
      'test/e2e/load-from-refused.test.ts',
      'test/e2e/update-from-peer-untouched.test.ts'
    ]
  },
  {
    why: 'pieces of a transfer are gathered into one buffer',
    file: 'src/peer/weight-sender.ts',
    before: 'const buffer = buffers[index % 2]!.subarray(0, piece.length)',
    after: 'const buffer = buffers[0]!.subarray(0, piece.length)',
    tests: ['test/e2e/load-from.test.ts', 'test/e2e/update-from-peer.test.ts']
  },
  {
    why: 'the last piece of a transfer is not received',
    file: 'src/peer/piece-stream.ts',
    before: 'if (this.#index < pieces.length) this.#receive().catch(() => {})',
    after: `if (this.#index < pieces.length - 1) this.#receive().catch(() => {})
    else this.#index = pieces.length`,
    tests: ['test/e2e/load-from.test.ts', 'test/e2e/update-from-peer.test.ts']
  },
  {
    why: 'an engine of another dtype sends its weights',
    file: 'src/peer/fleet-info.ts',
    before: 'if (own.dtype !== peer.dtype) {',
    after: 'if (own.dtype !== peer.dtype && own.device !== peer.device) {',
    tests: ['test/peer/fleet-info.test.ts']
  },
  {
    why: 'an engine that loads weights itself is chosen as a sender',
    file: 'src/peer/fleet-info.ts',
    before: `    : from !== null
    ? loadingFrom(from)
`,
    after: '',
    tests: ['test/peer/fleet-info.test.ts']
  },
  {
    why: 'engines of different rank counts send parameters',
    file: 'src/peer/fleet-info.ts',
    before: 'const isDirect = own.ranks === peer.tp_size &&',
    after: 'const isDirect = own.ranks <= peer.tp_size &&',
    tests: ['test/peer/fleet-info.test.ts']
  }
]
