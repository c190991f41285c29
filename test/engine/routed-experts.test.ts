import t from 'tap'
import fc from 'fast-check'
import { ExpertPages } from '../../src/engine/expert-pages.ts'
import { sizeCore } from '../../src/engine/memory/size-core.ts'
import { recordedBytes, recordedLayout } from '../../src/engine/expert-layout.ts'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { generateText } from '../../src/engine/text-generation.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const range = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => from + i)

t.test('pages return the last stored value of each slot, over slabs, pages and cuts of any size', async t => {
  fc.assert(
    fc.property(
      fc.constantFrom([4, 3], [16, 1], [2, 20_000], [1, 5]),
      fc.array(fc.record({ sequence: fc.nat(1), from: fc.nat(30), count: fc.integer({ min: 1, max: 20 }) }), {
        minLength: 1,
        maxLength: 12
      }),
      ([pageSize = 1, width = 1], writes) => {
        const pages = new ExpertPages(pageSize, width)
        // Two sequences that share their first pages.
        const tables = [0, 1].map(s =>
          Int32Array.from({ length: 60 }, (_, i) => i * pageSize < 8 ? i : 100 * (s + 1) + i)
        )
        const slots = new Map<number, number>()
        const slotOf = (s: number, position: number): number =>
          tables[s]![Math.floor(position / pageSize)]! * pageSize + position % pageSize
        for (const [n, { sequence, from, count }] of writes.entries()) {
          const rows = Uint16Array.from({ length: (count + 1) * width }, (_, i) => Math.floor(i / width) * 100 + n)
          pages.write(tables[sequence]!, from, rows, 1, count)
          for (let i = 0; i < count; i++) slots.set(slotOf(sequence, from + i), (i + 1) * 100 + n)
        }
        for (const s of [0, 1]) {
          const read = pages.read(tables[s]!, 3, 49)
          if (read.length !== 46 * width) throw new Error('another length')
          for (let i = 0; i < 46; i++) {
            const expected = slots.get(slotOf(s, i + 3)) ?? 0
            if (read[i * width] !== expected || read[(i + 1) * width - 1] !== expected) {
              throw new Error(
                `position ${i + 3}: ${read[i * width]}, expected ${expected}`
              )
            }
          }
        }
      }
    ),
    { numRuns: 40 }
  )
  t.throws(() => {
    new ExpertPages(4, 2).write(new Int32Array(1), 0, new Uint16Array(3), 0, 2)
  }, { message: /recorded 3 experts; expected 4 or more/ })
  t.equal(new ExpertPages(4, 0).read(new Int32Array(1), 0, 3).length, 0)
  t.equal(new ExpertPages(4, 2).read(new Int32Array(1), 3, 2).length, 0)
})

t.test('samples of one prompt share its experts, which are computed once, and have own ones after it', async t => {
  const h = new Harness({ maxBatchTokens: 16 })
  const ids = range(6).map(seed =>
    h.add(makeRequest(range(41), { seed: BigInt(seed), maxNewTokens: 5, ignoreEos: true }, null, undefined, 0))
  )
  h.drain()
  for (const id of ids) h.verify(id)
  const experts = ids.map(id => Array.from(h.outcomes.get(id)!.events.at(-1)!.experts!))
  t.same(new Set(experts.map(({ length }) => length)), new Set([(41 + 5 - 1) * 3]))
  t.same(new Set(experts.map(list => list.slice(0, 41 * 3).join())).size, 1)
  t.same(new Set(experts.map(list => list.slice(41 * 3).join())).size, 6)
})

t.test('a request that is aborted while retracted has the experts of the weights that made its tokens', async t => {
  const h = new Harness()
  const id = h.add(makeRequest(range(10), { maxNewTokens: 50, ignoreEos: true }, null, undefined, 2))
  for (let i = 0; i < 6; i++) h.scheduler.step()
  h.scheduler.pause('retract')
  const made = h.tokens(id).length
  h.scheduler.shut(1, false)
  h.openWith(7)
  h.scheduler.abort(id)
  h.verify(id)
  const { experts, finish } = h.outcomes.get(id)!.events.at(-1)!
  t.equal(finish!.type, 'abort')
  t.same(experts!.length, (10 + made - 1 - 2) * 3)
  t.notOk([...experts!].some((value, i) => i % 3 === 2 && value === 7))
})

t.test('if no experts are recorded, requests for them fail and others continue', async t => {
  const h = new Harness({ recorded: 0 })
  const [asks, goesOn] = [0, undefined].map(from =>
    h.add(makeRequest(range(5), { maxNewTokens: 2 }, null, undefined, from))
  )
  h.drain()
  t.match(h.outcomes.get(asks!)!.error, { code: 'UNSUPPORTED' })
  t.equal(h.outcomes.get(goesOn!)!.events.at(-1)!.experts, undefined)
})

const MOE = tinyArchitecture('Qwen3MoeForCausalLM')

t.test('memory for experts is sized next to the KV cache, and unfit models and machines are refused', async t => {
  const layout = recordedLayout(MOE, true)!
  t.equal(recordedBytes(layout), layout.sparse.length * layout.perToken * 2)
  t.equal(recordedLayout(MOE, false), null)
  const table = buildModelTable(MOE, 1)
  const noGpus = async (): Promise<never> => {
    throw new Error('no GPU is looked for')
  }
  const on = await sizeCore(MOE, table, { enableReturnRoutedExperts: true, threads: 1 }, {} as never, noGpus)
  t.match(on, { core: { recordExperts: true }, experts: layout })
  const off = await sizeCore(MOE, table, { threads: 1 }, {} as never, noGpus)
  t.equal(off.experts, null)
  t.notOk('recordExperts' in off.core, 'no memory is used without the option')
  const dense = tinyArchitecture('Qwen3ForCausalLM')
  await t.rejects(
    sizeCore(dense, buildModelTable(dense, 1), { enableReturnRoutedExperts: true }, {} as never, noGpus),
    { code: 'CONFIG', message: /Qwen3ForCausalLM has no experts/ }
  )
  const found = async () => ({
    driverCuda: '13.0',
    runtimeCuda: '13.0',
    driverVersion: '580',
    architectures: '90',
    gpus: [{
      ordinal: 0,
      name: 'H200',
      uuid: 'GPU-0',
      pciBusId: '',
      computeCapability: '9.0',
      multiprocessors: 132,
      totalBytes: 1e15,
      freeBytes: 1e15,
      virtualMemory: true,
      integrated: false
    }],
    peerAccess: [],
    libraries: []
  })
  const needs = { weightBytes: 1, spareBytes: 0, kvBytes: 1, scratchBytes: 1, fixedBytes: 1 }
  const cuda = { cudaMemoryNeeds: () => needs }
  t.match(
    await sizeCore(MOE, table, { device: 'cuda', enableReturnRoutedExperts: true, maxTotalTokens: 1024 }, cuda, found),
    { core: { recordExperts: true }, experts: layout }
  )
  await t.rejects(
    sizeCore(MOE, table, { device: 'cuda', enableReturnRoutedExperts: true, maxTotalTokens: 2 ** 40 }, cuda, found),
    { code: 'CONFIG', message: /GB of host memory, of which .* are free; lower --max-total-tokens/ }
  )
})

// Token n of prompt 1 is the letter n; its experts are the position, twice.
class Letters {
  readonly aborted: string[] = []
  async *generate ({ inputIds, expertsFrom = 0 }: GenerateRequest): AsyncGenerator<TokenEvent> {
    for (let n = 1; n <= 9; n++) {
      const finish = this.aborted.length > 0 && n > 6
        ? { type: 'abort' as const, message: 'Aborted' }
        : n === 9
        ? { type: 'length' as const, length: 9 }
        : null
      const experts = finish === null
        ? {}
        : {
          experts: Uint16Array.from(
            range(inputIds.length + n - 1 - expertsFrom, expertsFrom).flatMap(position => [position, position])
          )
        }
      yield {
        tokens: [n],
        logprobs: [],
        top: [],
        ids: [],
        input: null,
        weightVersion: 'v',
        promptTokens: inputIds.length,
        cachedTokens: 0,
        completionTokens: n,
        retractions: 0,
        seed: 1n,
        ...experts,
        finish
      }
      if (finish !== null) break
    }
  }

  abort (rid: string): boolean {
    return this.aborted.push(rid) > 0
  }
}

t.test('a stop text ends the request, waits for its experts, and cuts them with the tokens', async t => {
  const detokenizer = {
    push: (ids: ArrayLike<number>) => Array.from(ids, id => String.fromCharCode(96 + id)).join(''),
    flush: () => ''
  }
  for (const expertsFrom of [0, 2, undefined]) {
    const engine = new Letters()
    const request = { ...makeRequest([5, 6, 7]), ...expertsFrom === undefined ? {} : { expertsFrom } }
    const events = []
    for await (const event of generateText(engine, request, detokenizer, { stop: ['d'], noStopTrim: false })) {
      events.push(event)
    }
    const last = events.at(-1)!
    t.same([
      events.map(({ text }) => text).join(''),
      events.flatMap(({ tokens }) => tokens),
      last.finish,
      last.completionTokens
    ], ['abc', [1, 2, 3, 4], { type: 'stop', matched: 'd' }, 4])
    if (expertsFrom === undefined) {
      t.same([engine.aborted, last.experts], [[], undefined], 'left as before')
      continue
    }
    t.same(engine.aborted, [request.rid])
    t.same([...last.experts!], range(3 + 4 - 1 - expertsFrom, expertsFrom).flatMap(position => [position, position]))
  }
  const engine = new Letters()
  const events = []
  for await (
    const event of generateText(engine, { ...makeRequest([5]), expertsFrom: 0 }, detokenizer, {
      stop: ['i'],
      noStopTrim: false
    })
  ) events.push(event)
  t.same([engine.aborted, events.at(-1)!.experts!.length], [[], 18], 'on the last token: nothing is left to abort')
})
