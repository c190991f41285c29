import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { ROW_FLOATS, ROW_INTS } from '../../src/native/step.ts'
import type { CoreConfig } from '../../src/native/core-config.ts'
import type { StepBatch } from '../../src/native/step.ts'
import { plainModel } from './helpers/plain-core.ts'
import { runStep } from './helpers/run-step.ts'

const addon = native()

t.test('the product build has no fault points', async t => {
  t.equal(addon.faults, false)
  t.equal(addon.armFault, undefined)
})

t.test('a configuration is refused with the field, the expected and the given value', async t => {
  const { config } = plainModel()
  const cases: Array<[Record<string, unknown>, RegExp]> = [
    [{ device: 'tpu' }, /^config.device: expected "cpu" or "cuda", got "tpu"$/],
    [{ ranks: 0 }, /^config.ranks: expected an integer from 1 to 1024, got 0$/],
    [{ ranks: '2' }, /^config.ranks: expected an integer, got "2"$/],
    [{ threads: 2.5 }, /^config.threads: .* got 2.5$/],
    [{ dtype: 'int8' }, /^config.dtype: expected "bfloat16" or "float16" or "float32", got "int8"$/],
    [{ isa: 7 }, /^config.isa: expected a string, got 7$/],
    [{ isa: 'sse9' }, /sse9/],
    [{ pages: undefined }, /^config.pages: expected an integer, got undefined$/],
    [{ pageSize: 0 }, /^config.pageSize/],
    [{ recipe: null }, /^config.recipe: expected an object, got null$/],
    [{ recipe: { ...config.recipe, heads: NaN } }, /^config.recipe.heads: .* got NaN$/],
    [
      { recipe: { ...config.recipe, rmsNormEps: Infinity } },
      /^config.recipe.rmsNormEps: expected a finite number, got Infinity$/
    ],
    [
      { recipe: { ...config.recipe, ropeInvFreq: [1] } },
      /^config.recipe.ropeInvFreq: expected Float64Array, got an array$/
    ],
    [
      { recipe: { ...config.recipe, ropeInvFreq: new Float64Array(7) } },
      /rope_inv_freq has 7 entries, expected head_dim \/ 2 = 8$/
    ],
    [
      { recipe: { ...config.recipe, sparseLayers: new Uint8Array(2) } },
      /sparse_layers has 2 entries for 1 layers$/
    ],
    [{ recipe: { ...config.recipe, normTopkProb: 0 } }, /^config.recipe.normTopkProb: expected a boolean, got 0$/],
    [
      { recipe: { ...config.recipe, qkNorm: 'whole' } },
      /^config.recipe.qkNorm: expected "none", "head" or "projection", got "whole"$/
    ],
    [{ recipe: { ...config.recipe, oBias: true } }, /parameter layers.0.o_bias is missing$/],
    [
      { params: config.params.map((param, i) => i === 3 ? { ...param, dtype: 'float32' } : param) },
      /parameter layers.0.o is float32, but the forward pass computes in bfloat16$/
    ],
    [{ params: [{ name: 'a', rows: 1, cols: 1, dtype: 'int8' }] }, /^config.params\[0\].dtype: expected "bfloat16"/],
    [{ params: {} }, /^config.params: expected an array, got an object$/],
    [{ params: [null] }, /^config.params\[0\]: expected an object, got null$/],
    [{ params: [{ name: 'a', rows: -1, cols: 1 }] }, /^config.params\[0\].rows: expected an integer from 0/],
    [{ params: config.params.slice(1) }, /embed/],
    [{ params: config.params.map(param => param.name === 'norm' ? { ...param, rows: 63 } : param) }, /norm/]
  ]
  for (const [change, message] of cases) {
    t.throws(() => addon.createCore({ ...config, ...change } as CoreConfig), { message })
  }
  t.throws(() => addon.createCore(undefined as unknown as CoreConfig), {
    message: 'config: expected an object, got undefined'
  })
  t.throws(() => addon.createCore({ ...config, ranks: 1024 }), Error)
})

t.test('too little memory is an error with the sizes', async t => {
  const vocab = 2 ** 31 - 64
  const { config } = plainModel({ hidden: 2 ** 20, vocab })
  t.throws(() => addon.createCore(config), {
    message: /^not enough memory for \d{9,} MB of weights and 4 KV pages of 16 tokens$/
  })
})

t.test('a handle must be a number of an open core', async t => {
  for (const handle of [undefined, 'x', -1, 0.5, 2 ** 40]) {
    t.throws(() => addon.coreInfo(handle as number), { message: /^handle: expected an integer/ })
  }
  t.throws(() => addon.coreInfo(123456), { message: 'no core has handle 123456: it was never created, or closed' })
})

t.test('a step checks types and lengths of its arrays, and gives fresh ones', async t => {
  const { config } = plainModel()
  const core = addon.createCore(config)
  await addon.scramble(core, 1n)
  const batch: StepBatch = {
    tokens: Int32Array.of(1, 2, 3),
    seqOffsets: Int32Array.of(0, 3),
    startPos: Int32Array.of(0),
    pageOffsets: Int32Array.of(0, 1),
    pages: Int32Array.of(2),
    rowInts: Int32Array.of(2, -1, 0, 2, 1, 0, -1),
    rowFloats: new Float32Array(ROW_FLOATS),
    rowSeeds: BigUint64Array.of(1n),
    historyOffsets: Int32Array.of(0, 0),
    history: new Int32Array(0),
    biasOffsets: Int32Array.of(0, 0),
    biasTokens: new Int32Array(0),
    biasValues: new Float32Array(0),
    idOffsets: Int32Array.of(0, 1),
    ids: Int32Array.of(5),
    masks: new Uint32Array(0),
    adapters: new Int32Array(0)
  }
  batch.rowFloats.set([0, 1, 0, 0, 0, 1])
  t.equal(batch.rowInts.length, ROW_INTS)
  const result = runStep(addon, core, batch)
  t.equal(result.tokens.length, 1)
  t.ok(result.tokens[0]! >= 0 && result.tokens[0]! < 128)
  t.ok(result.logprobs[0]! < 0)
  t.equal(result.topIds.length, 2)
  t.equal(result.topIds[0], result.tokens[0], 'greedy takes the best')
  t.equal(result.topLogprobs[0], result.logprobs[0])
  t.equal(result.idLogprobs.length, 1)
  const again = runStep(addon, core, batch)
  t.strictSame(again, result)
  t.not(again.tokens.buffer, result.tokens.buffer)
  // A view of a larger buffer is read in place.
  const wide = new Int32Array(8)
  wide.set(batch.tokens, 4)
  t.strictSame(runStep(addon, core, { ...batch, tokens: wide.subarray(4, 7) }), result)

  // Token 77 alone is allowed, by the second of two masks.
  const masks = new Uint32Array(8)
  masks[4 + 2] = 1 << 13
  const masked = runStep(addon, core, { ...batch, masks, rowInts: Int32Array.of(2, -1, 0, 2, 1, 0, 1) })
  t.same([masked.tokens[0], masked.logprobs[0]], [77, 0])

  const changed = (change: object): () => unknown => () => runStep(addon, core, { ...batch, ...change })
  for (const name of Object.keys(batch)) {
    t.throws(changed({ [name]: new Uint16Array(4) }), {
      message: new RegExp(`^batch.${name}: expected \\w+Array, got a typed array of another type$`)
    })
    t.throws(changed({ [name]: undefined }), {
      message: new RegExp(`^batch.${name}: expected \\w+Array, got undefined$`)
    })
  }
  t.throws(changed({ seqOffsets: Int32Array.of(0) }), {
    message: 'batch.seqOffsets: expected 2 entries (one more than startPos), got 1'
  })
  t.throws(changed({ rowInts: new Int32Array(5) }), {
    message: 'batch.rowInts: expected 7 entries (ROW_INTS for each of rowSeeds), got 5'
  })
  t.throws(changed({ rowFloats: new Float32Array(7) }), { message: /^batch.rowFloats: expected 6/ })
  t.throws(changed({ biasTokens: Int32Array.of(1) }), {
    message: 'batch.biasValues: expected 1 entries (as many as biasTokens), got 0'
  })
  for (const name of ['historyOffsets', 'biasOffsets', 'idOffsets']) {
    t.throws(changed({ [name]: new Int32Array(3) }), { message: new RegExp(`^batch.${name}: expected 2`) })
  }
  // The device checks the meaning of the numbers. None of these values may crash the process.
  for (
    const change of [
      { tokens: Int32Array.of(1, 2, 128) },
      { tokens: Int32Array.of(1, -2, 3) },
      { pages: Int32Array.of(4) },
      { pages: Int32Array.of(-1) },
      { seqOffsets: Int32Array.of(0, 4) },
      { seqOffsets: Int32Array.of(1, 3) },
      { startPos: Int32Array.of(-1) },
      { startPos: Int32Array.of(14) },
      { startPos: Int32Array.of(2 ** 31 - 1) },
      { pageOffsets: Int32Array.of(0, 2) },
      { pageOffsets: Int32Array.of(1, 0) },
      { idOffsets: Int32Array.of(0, 2) },
      { ids: Int32Array.of(128) },
      { rowInts: Int32Array.of(3, -1, 0, 0, 0, 0, -1) },
      { rowInts: Int32Array.of(0, 128, 0, 0, 0, 0, -1) },
      { rowInts: Int32Array.of(2, -1, 0, 2, 1, 0, 0) },
      { masks: new Uint32Array(3) },
      { historyOffsets: Int32Array.of(0, 1) },
      { biasOffsets: Int32Array.of(0, 1) }
    ]
  ) {
    t.throws(changed(change), Error, JSON.stringify(change))
  }
  t.strictSame(runStep(addon, core, batch), result, 'the core still works')
  addon.closeCore(core)
})
