import { closeSync, openSync, readFileSync, readdirSync, rmSync, writeFileSync, writeSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'
import t from 'tap'
import type { Fault, NativeAddon } from '../../src/native/addon.ts'
import type { CoreConfig } from '../../src/native/core-config.ts'
import type { CudaSegment, WriteJob, WriteOutcome } from '../../src/native/write-job.ts'
import { packageRoot } from '../../src/root.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'

// Writes from memory of other processes, through the addon and a CUDA library whose driver opens shared-memory files in
// place of GPU memory (native/test/ipc_stand_in.cc). Everything above the driver is the shipped code.

process.env.REFIT_CUDA_LIBRARY = join(packageRoot, 'build/stand-in/librefit_cuda.so')
const addon = createRequire(import.meta.url)(join(packageRoot, 'build/faults/refit.node')) as NativeAddon
const uuid = addon.cudaGpus().gpus[0]!.uuid
const made = new Set<string>()
t.teardown(() => {
  for (const name of made) rmSync(`/dev/shm${name}`, { force: true })
})

const model = plainModel({ ranks: 2 })
const config: CoreConfig = { ...model.config, device: 'cuda' }

function file (label: string, bytes: Uint8Array): string {
  const name = `/refit-segments-${process.pid}-${label}`
  made.add(name)
  writeFileSync(`/dev/shm${name}`, bytes)
  return name
}

function handle (name: string): Uint8Array {
  const bytes = new Uint8Array(64)
  bytes.set(Buffer.from(name))
  return bytes
}

/** bf16 bits that depend on the tensor, the element and the seed; never a NaN. */
function content (tensor: number, elements: number, seed: number): Uint8Array {
  const bits = Uint16Array.from({ length: elements }, (_, i) => (i * 40503 + tensor * 977 + seed * 7919) & 0x3fff)
  return new Uint8Array(bits.buffer)
}

/** Every tensor in a segment of its own, `skip` bytes behind its start. */
function jobOf (seed: number, change: (segment: CudaSegment, index: number) => void = () => {}, skip = 0): WriteJob {
  const tensors: number[] = []
  const rects: number[] = []
  const sources = model.tensors.map(({ rows, cols, rects: ranks }, index) => {
    const bytes = new Uint8Array(skip + rows * cols * 2)
    bytes.set(content(index, rows * cols, seed), skip)
    tensors.push(index, skip, 0, rows, cols, cols * 2, 2)
    for (const [rank, param, ...rest] of ranks) rects.push(index, rank, param, ...rest)
    const segment: CudaSegment = { uuid, handle: handle(file(String(index), bytes)), events: new Uint8Array() }
    change(segment, index)
    return { segment }
  })
  return { sources, tensors: Float64Array.from(tensors), rects: Float64Array.from(rects) }
}

async function expected (seed: number): Promise<Uint8Array[]> {
  const cpu = addon.createCore(model.config)
  const job = jobOf(seed)
  const outcome = await addon.write(cpu, {
    ...job,
    sources: model.tensors.map(({ rows, cols }, index) => ({ buffer: content(index, rows * cols, seed) }))
  })
  t.equal(outcome.error, undefined)
  const all = await readAll(addon, cpu, model)
  addon.closeCore(cpu)
  return all
}

function mappings (): number {
  return readFileSync('/proc/self/maps', 'utf8').split('\n').filter(line => line.includes('/refit-segments-')).length
}

/** Number of segments that the two ranks open for all tensors. */
const ALL = 2 * model.tensors.length
const states = (outcome: WriteOutcome): number[] => [...new Set(outcome.states)]

t.test("tensors in other processes' segments arrive on every rank, and all mappings are closed", async t => {
  const core = addon.createCore(config)
  for (const [seed, skip] of [[1, 0], [2, 6], [1, 512]] as const) {
    const outcome = await addon.write(core, jobOf(seed, undefined, skip))
    t.match(outcome, { error: undefined, warning: undefined, segmentsOpened: ALL, segmentsClosed: ALL })
    t.strictSame(states(outcome), [2])
    t.strictSame(await readAll(addon, core, model), await expected(seed))
    t.equal(mappings(), 0)
  }
  addon.closeCore(core)
})

t.test('kept segments stay open, show later writes, and are closed by their name or with the core', async t => {
  const core = addon.createCore(config)
  const keep = (segment: CudaSegment): void => {
    segment.keep = 'pool'
  }
  t.match(await addon.write(core, jobOf(3, keep)), { segmentsOpened: ALL, segmentsClosed: 0 })
  const bytes = content(0, model.tensors[0]!.rows * model.tensors[0]!.cols, 4)
  const job = jobOf(3, keep)
  const fd = openSync(`/dev/shm${[...made][0]!}`, 'r+')
  writeSync(fd, bytes, 0, bytes.length, 0)
  closeSync(fd)
  t.match(await addon.write(core, job), { error: undefined, segmentsOpened: 0, segmentsClosed: 0 })
  t.equal(mappings(), ALL)
  t.equal(await addon.closeMappings(core, 'other'), 0)
  t.equal(await addon.closeMappings(core, 'pool'), ALL)
  t.equal(mappings(), 0)
  t.match(await addon.write(core, jobOf(5, keep)), { segmentsOpened: ALL, segmentsClosed: 0 })
  addon.closeCore(core)
  t.equal(mappings(), 0)
})

t.test('a fault at any opening or event leaves every weight as it was, and nothing open', async t => {
  const core = addon.createCore(config)
  const event = file('done', Uint8Array.of(1, 0, 0, 0))
  const events = (segment: CudaSegment, index: number): void => {
    if (index === 0) segment.events = handle(event)
  }
  await addon.write(core, jobOf(6))
  const before = await readAll(addon, core, model)
  const points: Array<[Fault['point'], number]> = [
    ['event', 1],
    ...Array.from({ length: ALL }, (_, i): [Fault['point'], number] => ['open', i + 1])
  ]
  for (const [point, at] of points) {
    addon.armFault!({ point, at, action: 'fail' })
    const outcome = await addon.write(core, jobOf(7, events))
    t.match(outcome.error?.message, `injected fault: ${point}`)
    t.strictSame(states(outcome), [0], `${point} ${at}`)
    t.equal(outcome.segmentsOpened, outcome.segmentsClosed)
    t.strictSame(await readAll(addon, core, model), before)
  }
  addon.armFault!(null)
  t.equal(mappings(), 0)
  t.match(await addon.write(core, jobOf(7, events)), { error: undefined, segmentsOpened: ALL })
  addon.closeCore(core)
})

t.test('a closing that fails is reported, and the next write repeats it', async t => {
  const core = addon.createCore(config)
  addon.armFault!({ point: 'close', at: 3, action: 'fail' })
  const outcome = await addon.write(core, jobOf(8))
  t.match(outcome, {
    error: undefined,
    segmentsOpened: ALL,
    segmentsClosed: ALL - 1,
    warning: /stays open on rank \d, injected fault: close/
  })
  addon.armFault!(null)
  t.match(await addon.write(core, jobOf(8)), { warning: undefined, segmentsOpened: ALL, segmentsClosed: ALL + 1 })
  t.equal(mappings(), 0)
  addon.closeCore(core)
})

t.test('nothing is read before an event is done, and one that is never done changes nothing', async t => {
  const core = addon.createCore(config)
  const name = file('late', new Uint8Array(4))
  const events = (segment: CudaSegment): void => {
    segment.events = handle(name)
  }
  t.match(await addon.write(core, { ...jobOf(9, events), eventTimeoutMs: 30 }), {
    error: { message: /was not done after 30 ms/ },
    segmentsOpened: ALL,
    segmentsClosed: ALL
  })
  const job = jobOf(9, events)
  let ended = false
  const writing = addon.write(core, job).finally(() => {
    ended = true
  })
  await new Promise(resolve => setTimeout(resolve, 50))
  t.notOk(ended)
  const fd = openSync(`/dev/shm${name}`, 'r+')
  writeSync(fd, Uint8Array.of(1, 0, 0, 0))
  t.strictSame(states(await writing), [2])
  closeSync(fd)
  t.strictSame(await readAll(addon, core, model), await expected(9))
  addon.closeCore(core)
})

t.test('every refusal names its tensor and gives advice', async t => {
  const core = addon.createCore(config)
  await addon.write(core, jobOf(10))
  const before = await readAll(addon, core, model)
  const cases: Array<[string, RegExp, (segment: CudaSegment) => void]> = [
    ['a sender that has gone', /cannot be opened: .*the sender has freed it or has ended.*--ipc=host/, segment => {
      segment.handle = handle('/refit-none')
    }],
    ['bytes that are no handle', /cannot be opened: .*--ipc=host.*cudaMallocAsync/, segment => {
      segment.handle = new Uint8Array(64).fill(255)
    }],
    [
      'a GPU that is not here',
      /the sender's GPU GPU-x is not visible to this process: .*CUDA_VISIBLE_DEVICES/,
      segment => {
        segment.uuid = 'GPU-x'
      }
    ],
    [
      'an event that has gone',
      /event that its sender recorded cannot be waited for: .*must keep them until the reply/,
      segment => {
        segment.events = handle('/refit-none')
      }
    ],
    ['memory that is too short', /ends at byte 12\d+ of its CUDA memory, which has 7:/, segment => {
      segment.handle = handle(file('short', new Uint8Array(7)))
    }],
    ['a block that is too short', /a block is shorter than blockBytes/, segment => {
      segment.handle = { blockBytes: 1 << 20, fds: [], fabric: handle(file('short', new Uint8Array(7))) }
    }]
  ]
  for (const [name, message, spoil] of cases) {
    const outcome = await addon.write(
      core,
      jobOf(11, (segment, index) => {
        if (index === 8) spoil(segment)
      })
    )
    t.match(outcome.error, { message, tensor: 8 }, name)
    t.strictSame(states(outcome), [0], name)
    t.equal(outcome.segmentsOpened, outcome.segmentsClosed, name)
  }
  t.strictSame(await readAll(addon, core, model), before)
  t.equal(mappings(), 0)
  addon.closeCore(core)
  const cpu = addon.createCore(model.config)
  t.match(await addon.write(cpu, jobOf(1)), {
    error: { message: /this engine runs on the CPU.*run the engine on GPUs/, tensor: 0 },
    segmentsOpened: 0
  })
  addon.closeCore(cpu)
})

t.test("expandable segments are mapped block by block, and recognised by their descriptors' files", async t => {
  const core = addon.createCore(config)
  const BLOCK = 4096
  const tensor = model.tensors[0]!
  const bytes = content(0, tensor.rows * tensor.cols, 12)
  const fds: number[] = []
  const job = (): WriteJob =>
    jobOf(12, (segment, index) => {
      if (index === 0) {
        Object.assign(segment, { handle: { blockBytes: BLOCK, fds, fabric: new Uint8Array() }, keep: 'blocks' })
      }
    })
  // The descriptors are closed here before the write begins: the addon has duplicates.
  const opened = (): void => {
    for (let at = 0; at < bytes.length; at += BLOCK) {
      fds.push(openSync(`/dev/shm${file(`block-${at}`, bytes.slice(at, at + BLOCK))}`, 'r'))
    }
  }
  const closed = (): void => {
    for (const fd of fds.splice(0)) closeSync(fd)
  }
  const before = readdirSync('/proc/self/fd').length
  opened()
  const writing = addon.write(core, job())
  closed()
  t.match(await writing, { error: undefined, segmentsOpened: ALL })
  t.strictSame(await readAll(addon, core, model), await expected(12))
  const kept = await addon.closeMappings(core, 'blocks')
  t.ok(kept === 2 || kept === 0, 'kept, where the system compares descriptors')
  t.equal(readdirSync('/proc/self/fd').length, before, 'no descriptor is left')
  addon.closeCore(core)
})

t.test('malformed segments are refused before anything is queued', t => {
  const core = addon.createCore(config)
  const cases: Array<[RegExp, (segment: Record<string, unknown>) => void]> = [
    [/^job.sources\[0\].segment.uuid: expected a string, got 7$/, segment => {
      segment.uuid = 7
    }],
    [/^job.sources\[0\].segment.events: expected Uint8Array, got undefined$/, segment => {
      delete segment.events
    }],
    [/^segment 0: event handles have 63 bytes, expected 64 for each$/, segment => {
      segment.events = new Uint8Array(63)
    }],
    [/^segment 0: the handle has 66 bytes, expected 64$/, segment => {
      segment.handle = new Uint8Array(66)
    }],
    [/^job.sources\[0\].segment.handle: expected an object, got null$/, segment => {
      segment.handle = null
    }],
    [/^job.sources\[0\].segment.handle.blockBytes: expected an integer from 1/, segment => {
      segment.handle = { blockBytes: 0, fds: [0], fabric: new Uint8Array() }
    }],
    [/^job.sources\[0\].segment.handle.fds\[1\]: cannot use file descriptor 999999: Bad file descriptor$/, segment => {
      segment.handle = { blockBytes: 4096, fds: [0, 999999], fabric: new Uint8Array() }
    }],
    [/^segment 0: expected a handle, descriptors of blocks, or fabric handles of blocks$/, segment => {
      segment.handle = { blockBytes: 4096, fds: [0], fabric: new Uint8Array(64) }
    }]
  ]
  const before = readdirSync('/proc/self/fd').length
  for (const [message, spoil] of cases) {
    t.throws(() =>
      addon.write(
        core,
        jobOf(1, (segment, index) => {
          if (index === 0) spoil(segment as unknown as Record<string, unknown>)
        })
      ), { message })
  }
  t.equal(readdirSync('/proc/self/fd').length, before, 'descriptors that were duplicated are closed')
  addon.closeCore(core)
  t.end()
})

t.test('descriptors of other processes are duplicated, or refused with the reason', t => {
  const fd = openSync('/proc/self/status', 'r')
  const own = addon.takeDescriptor(process.pid, fd)
  t.not(own, fd)
  t.match(readFileSync(own, 'utf8'), `Pid:\t${process.pid}`)
  closeSync(own)
  closeSync(fd)
  t.throws(() => addon.takeDescriptor(process.pid, 999999), {
    message: /^descriptor 999999 of process \d+ cannot be taken: pidfd_getfd: Bad file descriptor: /
  })
  t.throws(() => addon.takeDescriptor(0x7ffffff, 1), {
    message: /there is no process 134217727: the sender has ended, or it is in another PID namespace/
  })
  t.throws(() => addon.takeDescriptor(0, 1), { message: /^pid: expected an integer from 1/ })
  t.end()
})
