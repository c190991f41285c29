import { existsSync, mkdirSync, openSync, readSync, writeSync, closeSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import {
  answering,
  at,
  changed,
  DISK,
  FAILURE,
  isOk,
  isUpdate,
  json,
  labelOf,
  setLabel,
  silent,
  SILENCE_MS,
  SUCCESS,
  swallow,
  TENSOR,
  whileUpdating,
  withoutLabel
} from './fault-forms.ts'
import type { Answered, Fault } from './faulty-proxy.ts'

// Servers that break one promise each, as faults of a proxy in front of refit.

/** Folders of variants B and C. */
interface Folders {
  b: string
  c: string
}

interface FaultCase {
  /** `a server that ...` */
  name: string
  make: (folders: Folders) => Fault
  /** Rows that must be broken, and what they must report. */
  rows: Record<string, RegExp>
  /** Shorter than usual if the fault is silence. */
  patienceMs?: number
}

const ACCEPTED = /was accepted/

/** Rows of refused updates. */
const REFUSALS: Record<string, RegExp> = {
  'refusals/unknown-name (disk)': ACCEPTED,
  'refusals/unknown-name (distributed)': ACCEPTED,
  'refusals/transposed (tensor)': ACCEPTED,
  'refusals/short-shape (bucket)': ACCEPTED,
  'refusals/wrong-dtype (upload)': ACCEPTED,
  'refusals/repeated-name (tensor)': ACCEPTED,
  'refusals/empty (upload)': ACCEPTED,
  'files/no-folder (disk)': ACCEPTED,
  'files/truncated (disk)': ACCEPTED,
  'files/cut-header (disk)': ACCEPTED,
  'files/false-offsets (disk)': ACCEPTED,
  'files/missing-shard (disk)': ACCEPTED,
  'files/outside (disk)': ACCEPTED,
  'files/too-long (upload)': ACCEPTED,
  'payloads/no-memory (tensor)': ACCEPTED,
  'payloads/short-memory (tensor)': ACCEPTED,
  'payloads/past-end (tensor)': ACCEPTED,
  'payloads/no-pickle (tensor)': ACCEPTED,
  'payloads/cut-pickle (tensor)': ACCEPTED,
  'payloads/beyond-bucket (bucket)': ACCEPTED,
  'payloads/short-place (bucket)': ACCEPTED,
  'groups/unequal-lists (distributed)': ACCEPTED,
  'groups/unknown-dtype (distributed)': ACCEPTED,
  'groups/unknown-group (distributed)': ACCEPTED,
  'refusals/incomplete (disk)': /was accepted, and the reply does not name it/
}

const OF_WEIGHTS: FaultCase[] = [
  {
    name: 'answers 200 to an update and writes nothing',
    make: () => swallow(at(TENSOR)),
    rows: {
      'identity/round-trip (tensor)': /serves A instead of B/,
      'identity/read-back (upload)': /was sent/,
      'concurrency/retry (tensor)': /serves A instead of B/
    }
  },
  {
    name: 'answers 200 to refused updates',
    make: () => ({
      takes: isUpdate,
      handle: async (passed, forward) => {
        await forward(passed)
        return SUCCESS
      }
    }),
    rows: REFUSALS
  },
  {
    name: 'writes a part of what it refuses',
    make: ({ b }) => ({
      takes: isUpdate,
      handle: async (passed, forward) => {
        const answered = await forward(passed)
        if (!isOk(answered)) await forward({ path: DISK, body: { model_path: b } })
        return answered
      }
    }),
    rows: { 'refusals/unknown-name (bucket)': /was refused \(400.*but the server then serves B/ }
  },
  {
    name: 'moves the label with a refused update',
    make: () => ({
      takes: isUpdate,
      handle: async (passed, forward) => {
        const answered = await forward(passed)
        const label = labelOf(passed)
        if (!isOk(answered) && label !== null) await setLabel(forward, label)
        return answered
      }
    }),
    rows: { 'refusals/transposed (disk)': /but the label is now/ }
  },
  {
    name: 'loses an update that equals the one before',
    make: ({ c }) => {
      let last = ''
      return {
        takes: at(DISK),
        handle: async (passed, forward) => {
          const { model_path: path } = json(passed.body)
          const isSame = path === last
          last = path
          return await forward(isSame ? { path: DISK, body: { ...json(passed.body), model_path: c } } : passed)
        }
      }
    },
    rows: { 'identity/repeat (disk)': /serves C instead of B/ }
  },
  {
    name: 'loses the fifth bucket',
    make: () => {
      let count = 0
      return { takes: at(TENSOR), handle: async (passed, forward) => ++count === 5 ? SUCCESS : await forward(passed) }
    },
    rows: { 'identity/parts (tensor)': /1 parts changed nothing/, 'identity/parts (bucket)': /1 parts changed nothing/ }
  },
  {
    name: 'loads other weights with an empty update',
    make: ({ c }) => changed(at(TENSOR), () => ({ path: DISK, body: Buffer.from(JSON.stringify({ model_path: c })) })),
    rows: { 'refusals/empty (tensor)': /serves C instead of A/ }
  },
  {
    name: 'answers a known prompt from its cache',
    make: () => {
      const cache = new Map<string, Answered>()
      return {
        takes: at('/generate'),
        handle: async (passed, forward) => {
          const key = passed.body.toString()
          if (key.includes('logprob_start_len')) return await forward(passed)
          const known = cache.get(key) ?? await forward(passed)
          cache.set(key, known)
          return known
        }
      }
    },
    rows: { 'answers/no-stale-cache (disk)': /away from what the new weights say/ }
  },
  {
    name: 'runs code of pickles',
    make: () => ({
      takes: at(TENSOR),
      handle: async (passed, forward) => {
        const [entry] = json(passed.body).serialized_named_tensors
        const [folder] = /\/[\w/.-]*refit-conformance-ran-\d+/.exec(Buffer.from(entry, 'base64').toString('latin1'))!
        if (!existsSync(folder)) mkdirSync(folder)
        return await forward(passed)
      }
    }),
    rows: { 'payloads/runs-nothing (tensor)': /os\.mkdir ran/ }
  },
  {
    name: 'keeps references to shared memory',
    make: () => ({
      takes: at(TENSOR),
      handle: async (passed, forward) => {
        const [entry] = json(passed.body).serialized_named_tensors
        const [name] = /\/torch_\d+_\d+_\d+/.exec(Buffer.from(entry, 'base64').toString('latin1'))!
        addReference(`/dev/shm${name}`)
        return await forward(passed)
      }
    }),
    rows: { 'payloads/memory-returned (tensor)': /references were left: 1, 0, 0, 0/ }
  }
]

function addReference (path: string): void {
  const fd = openSync(path, 'r+')
  const count = Buffer.alloc(4)
  readSync(fd, count, 0, 4, 0)
  count.writeInt32LE(count.readInt32LE() + 1)
  writeSync(fd, count, 0, 4, 0)
  closeSync(fd)
}

const OF_LABELS: FaultCase[] = [
  {
    name: 'moves the label before the weights',
    make: () => ({
      takes: at(DISK),
      handle: async (passed, forward) => {
        await setLabel(forward, labelOf(passed)!)
        await sleep(300)
        return await forward(passed)
      }
    }),
    rows: { 'labels/not-early (disk)': /with the label "[^"]+", the server serves A instead of B/ }
  },
  {
    name: 'never moves the label',
    make: () => changed(isUpdate, withoutLabel),
    rows: {
      'labels/moves (upload)': /the label is/,
      'senders/killed-after-bytes (upload)': /serves B under the label/,
      'pauses/held-gets-new (retract)': /names/
    }
  },
  {
    name: 'moves the label with every update',
    make: () =>
      changed(isUpdate, passed => ({
        body: Buffer.from(JSON.stringify({ weight_version: 'other', ...json(passed.body) }))
      })),
    rows: { 'labels/stays (distributed)': /moved from/ }
  },
  {
    name: 'does not move the label alone',
    make: () => swallow(at('/update_weight_version')),
    rows: { 'labels/alone': /the label is/ }
  },
  {
    name: 'gives all tokens of an answer the last label',
    make: () =>
      answering(at('/generate'), event => {
        const info = event.meta_info
        const { version } = info.weight_versions.at(-1) ?? { version: info.weight_version }
        const end = info.output_token_logprobs.length
        return { ...event, meta_info: { ...info, weight_versions: [{ version, start: 0, end }] } }
      }),
    rows: { 'answers/tokens-name-version (retract)': /is labelled as of B, but .* it is that of A/ }
  },
  {
    name: 'gives answers the label of the update before',
    make: () => {
      const labels: string[] = []
      return answering(at('/generate'), event => {
        const label = event.meta_info.weight_version
        if (labels.at(-1) !== label) labels.push(label)
        const version = labels.at(-2) ?? label
        const end = event.meta_info.output_token_logprobs.length
        return { ...event, meta_info: { ...event.meta_info, weight_versions: [{ version, start: 0, end }] } }
      })
    },
    rows: { 'load/under-load (disk)': /an answer that is labelled as of [ABC] is that of [ABC]/ }
  },
  {
    name: 'reads back other values',
    make: () =>
      answering(at('/get_weights_by_name'), (rows: number[][]) => [[9, ...rows[0]!.slice(1)], ...rows.slice(1)]),
    rows: { 'identity/read-back (disk)': /is 9, and/ }
  }
]

const OF_CONTROL: FaultCase[] = [
  {
    name: 'does not pause',
    make: () => swallow(at('/pause_generation')),
    rows: { 'pauses/holds (abort)': /during the pause/, 'pauses/unknown-mode': /was accepted/ }
  },
  {
    name: 'ends requests in every pause',
    make: () => changed(at('/pause_generation'), () => ({ body: Buffer.from('{"mode":"abort"}') })),
    rows: { 'pauses/running (retract)': /a request ended early/ }
  },
  {
    name: 'loses updates in a pause',
    make: () => swallow(at(DISK)),
    rows: { 'pauses/update (in_place)': /serves A instead of B/ }
  },
  {
    name: 'refuses to continue twice',
    make: () => {
      let count = 0
      return {
        takes: at('/continue_generation'),
        handle: async (passed, forward) => ++count === 2 ? FAILURE : await forward(passed)
      }
    },
    rows: { 'pauses/twice (abort)': /continuing was refused/ }
  },
  {
    name: 'cannot continue during an update',
    make: () => whileUpdating(path => isUpdate(path) || path === '/continue_generation', async () => FAILURE),
    rows: { 'concurrency/pause-and-update (abort)': /continuing was refused/ }
  },
  {
    name: 'drops the second of two updates and keeps its label',
    make: () =>
      whileUpdating(isUpdate, async (passed, forward) => {
        await sleep(600)
        await setLabel(forward, labelOf(passed)!)
        return SUCCESS
      }),
    rows: { 'concurrency/two-updates (tensor)': /under the label of the other|whose update was refused/ }
  },
  {
    name: 'loads other weights when memory is released',
    make: ({ c }) => ({
      takes: at('/release_memory_occupation'),
      handle: async (_passed, forward) => {
        await forward({ path: DISK, body: { model_path: c } })
        return SUCCESS
      }
    }),
    rows: { 'memory/asleep': /serves C/ }
  },
  {
    name: 'writes nothing while memory is released',
    make: () => swallow(path => path === DISK || path === '/release_memory_occupation'),
    rows: { 'memory/update-asleep': /then the server serves A/ }
  }
]

const OF_SENDERS: FaultCase[] = [
  {
    name: 'fills the rest of a broken upload with zeros',
    make: () => ({
      takes: at(TENSOR),
      handle: async (passed, forward) => {
        const rest = Number(passed.headers['content-length']) - passed.body.length
        return await forward({ ...passed, body: Buffer.concat([passed.body, Buffer.alloc(rest)]) })
      }
    }),
    rows: {
      'senders/killed-mid-bytes (upload)': /weights of no variant/,
      'senders/killed-before-bytes (upload)': /weights of no/
    }
  },
  {
    name: 'makes no second group',
    make: () => {
      let count = 0
      return {
        takes: at('/init_weights_update_group'),
        handle: async (passed, forward) => ++count > 1 ? FAILURE : await forward(passed)
      }
    },
    rows: {
      'senders/killed-before-join (distributed)': /was refused: 500/,
      'groups/same-name (distributed)': /in round 2/
    }
  },
  {
    name: 'reports a group without a trainer as made',
    make: () => swallow(at('/init_weights_update_group')),
    rows: { 'groups/absent-trainer (distributed)': /reported as made/ }
  },
  {
    name: 'does not answer when an unknown group is left',
    make: () => silent(at('/destroy_weights_update_group')),
    rows: { 'groups/destroy-unknown (distributed)': /got no answer within/ },
    patienceMs: SILENCE_MS
  },
  {
    name: 'answers no health check during a pause',
    make: () => silent(at('/health')),
    rows: {
      'stalls/health-in-pause (retract)': /\/health got no answer/,
      'stalls/health-in-update (upload)': /\/health got no answer/
    }
  },
  {
    name: 'does not generate while an update waits for its sender',
    make: () => silent(at('/generate')),
    rows: { 'stalls/generate-in-update (distributed)': /got no answer within/ },
    patienceMs: SILENCE_MS
  }
]

export const FAULTS: readonly FaultCase[] = [...OF_WEIGHTS, ...OF_LABELS, ...OF_CONTROL, ...OF_SENDERS]
