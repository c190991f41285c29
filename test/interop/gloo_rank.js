// A member of a gloo group by the addon alone, driven line by line by test_gloo.py: no store, no server.
import { createHash } from 'node:crypto'
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'
import { readdirSync } from 'node:fs'

const addon = createRequire(import.meta.url)(process.argv[2])
const say = answer => process.stdout.write(`${JSON.stringify(answer)}\n`)
const decoded = text => new Uint8Array(Buffer.from(text, 'base64'))

// Parameters are what bytes of a slot can be read back through: one of 16 MiB, 32 bytes a row.
const ROWS = 1 << 19
let core
let group

const commands = {
  group ({ size, ranks, host }) {
    const made = addon.glooGroup({ size, ranks, host })
    group = made.group
    return { addresses: made.addresses.map(address => Buffer.from(address).toString('base64')) }
  },
  connect: ({ peers, ms }) => addon.glooConnect(group, peers.map(decoded), ms),
  stage: ({ bytes }) => addon.stageGroup(group, bytes, 2),
  async receive ({ slot, parts, root, ms }) {
    const started = performance.now()
    await addon.groupReceive(group, slot, Float64Array.from(parts), root, ms)
    return { seconds: (performance.now() - started) / 1000 }
  },
  async aborted ({ reason, ms }) {
    setTimeout(() => addon.groupAbort(group, reason), 50)
    await addon.groupReceive(group, 0, Float64Array.of(0, 1000), 0, ms)
  },
  async sums ({ slot, parts }) {
    core ??= addon.createCore({
      device: 'cpu',
      ranks: 1,
      threads: 1,
      dtype: 'bfloat16',
      recipe: {
        hiddenSize: 16,
        layers: 1,
        heads: 1,
        kvHeads: 1,
        headDim: 16,
        vocabSize: ROWS,
        rmsNormEps: 1e-6,
        normPlacement: 'pre',
        qkNorm: 'none',
        activation: 'silu',
        roundOnce: false,
        qkvBias: false,
        oBias: false,
        tieWordEmbeddings: true,
        ropeInvFreq: new Float64Array(8),
        ropeScale: 1,
        sparseLayers: new Uint8Array(1),
        experts: 0,
        expertsPerToken: 0,
        normTopkProb: false
      },
      params: [
        ['embed', ROWS, 16],
        ['layers.0.ln1', 16, 1],
        ['layers.0.qkv', 48, 16],
        ['layers.0.o', 16, 16],
        ['layers.0.ln2', 16, 1],
        ['layers.0.gate_up', 32, 16],
        ['layers.0.down', 16, 16],
        ['norm', 16, 1]
      ]
        .map(([name, rows, cols]) => ({ name, rows, cols, dtype: 'bfloat16' })),
      pages: 2,
      pageSize: 16
    })
    const sums = []
    for (let i = 0; i < parts.length; i += 2) {
      const rows = Math.ceil(parts[i + 1] / 32)
      if (rows > 0) {
        const outcome = await addon.write(core, {
          sources: [{ staged: { group, slot } }],
          tensors: Float64Array.of(0, parts[i], 0, rows, 16, 32, 2),
          rects: Float64Array.of(0, 0, 0, 0, 0, rows, 16, 0, 0)
        })
        if (outcome.error !== undefined) throw new Error(outcome.error.message)
      }
      const bytes = rows === 0 ? new Uint8Array(0) : await addon.read(core, 0, 0, 0, 0, rows, 16)
      sums.push(createHash('sha256').update(bytes.subarray(0, parts[i + 1])).digest('hex'))
    }
    return { sums }
  },
  send: ({ bytes, ms }) => addon.groupSend(group, decoded(bytes), ms),
  barrier: ({ ms }) => addon.groupBarrier(group, ms),
  end: ({ abort }) => addon.endGroup(group, abort),
  left: () => ({ descriptors: readdirSync('/proc/self/fd').length, threads: readdirSync('/proc/self/task').length })
}

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...options } = JSON.parse(line)
  try {
    say(await commands[command](options) ?? {})
  } catch (error) {
    say({ error: error.message, code: error.code ?? 'none' })
  }
}
