import fc from 'fast-check'
import t from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { parseIndex, parseIndexInSlices } from '../../../src/wire/safetensors/index.ts'

const parse = (value: unknown): ReturnType<typeof parseIndex> =>
  parseIndex(Buffer.from(typeof value === 'string' ? value : JSON.stringify(value)), 'index')

t.test('an index as transformers writes it is read', async t => {
  const { weightMap, files } = parse(
    JSON.stringify(
      {
        metadata: { total_parameters: 5, total_size: 10.5 },
        weight_map: {
          b: 'model-00002-of-00002.safetensors',
          a: 'model-00001-of-00002.safetensors',
          c: 'model-00001-of-00002.safetensors'
        }
      },
      null,
      2
    ) + '\n'
  )
  t.same(files, ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
  t.same(Object.fromEntries(weightMap), { a: files[0], b: files[1], c: files[0] })
})

for (
  const name of [
    '../x.safetensors',
    '/etc/x.safetensors',
    'a/b.safetensors',
    'a\\b.safetensors',
    '..',
    '.',
    '',
    '.x.safetensors',
    'x\u0000.safetensors',
    'x\n.safetensors',
    'n'.repeat(300) + '.safetensors'
  ]
) {
  t.test(`the file name ${JSON.stringify(name.slice(0, 30))} is refused`, async t => {
    t.throws(() => parse({ weight_map: { t: name } }), {
      code: 'CHECKPOINT_FORMAT',
      message: /tensor "t": the file name .* is not a plain name beside the index/,
      param: 't'
    })
  })
}

const broken: Array<[string, string, RegExp]> = [
  [
    'other files than safetensors',
    '{"weight_map":{"t":"pytorch_model.bin"}}',
    /pytorch_model.bin" is not .safetensors/
  ],
  ['no map', '{"metadata":{}}', /has no weight_map/],
  ['an empty map', '{"weight_map":{}}', /its weight_map is empty/],
  ['a map that is a list', '{"weight_map":["a"]}', /bad index: expected '\{'/],
  ['numbers for file names', '{"weight_map":{"t":1}}', /expected '"'/],
  ['a tensor twice', '{"weight_map":{"t":"a.safetensors","t":"b.safetensors"}}', /the key "t" comes twice/],
  ['the map twice', '{"weight_map":{"t":"a.safetensors"},"weight_map":{"t":"a.safetensors"}}', /comes twice/],
  ['an end too early', '{"weight_map":{"t":"a.safe', /the text ends inside a string/],
  ['text after the end', '{"weight_map":{"t":"a.safetensors"}} x', /text after the end/],
  ['nothing in it', '', /expected '\{', got the end/]
]
for (const [what, text, message] of broken) {
  t.test(`an index with ${what} is refused`, async t => {
    t.throws(() => parse(text), { code: 'CHECKPOINT_FORMAT', message })
  })
}

t.test('an index may contain as many tensors as a checkpoint may have', async t => {
  const index = (count: number): string =>
    `{"weight_map":{${Array.from({ length: count }, (_, i) => `"${i}":"a.safetensors"`).join()}}}`
  t.equal(parse(index(500_000)).weightMap.size, 500_000)
  t.throws(() => parse(index(500_001)), { code: 'CHECKPOINT_FORMAT', message: /more than 500000 tensors/ })
})

t.test('any text gives an index or a format error', async t => {
  const check = (text: string): boolean => {
    try {
      parse(text)
      return true
    } catch (error) {
      return error instanceof RefitError && error.code === 'CHECKPOINT_FORMAT'
    }
  }
  fc.assert(fc.property(fc.json(), check), { numRuns: 1000 })
  fc.assert(fc.property(fc.json(), json => check(`{"weight_map":${json}}`)), { numRuns: 1000 })
  fc.assert(fc.property(fc.string(), check), { numRuns: 1000 })
})

t.test('an index of too many files is refused before their names are sorted', async t => {
  const map = (files: number): unknown => ({
    weight_map: Object.fromEntries(Array.from({ length: files }, (_, i) => [`t${i}`, `f${i}.safetensors`]))
  })
  t.equal(parse(map(4096)).files.length, 4096)
  t.throws(() => parse(map(4097)), { code: 'CHECKPOINT_FORMAT', message: 'index: more than 4096 files' })
})

t.test('the parse of a long index pauses', async t => {
  const names = Array.from({ length: 100_000 }, (_, i) => `model.layers.${i}.weight`)
  const map = Object.fromEntries(names.map((name, i) => [name, `${i % 7}.safetensors`]))
  const steps = parseIndexInSlices(Buffer.from(JSON.stringify({ weight_map: map })), 'index')
  let slices = 1
  let step = steps.next()
  for (; step.done !== true; step = steps.next()) slices++
  t.ok(slices > 40, `${slices} slices`)
  t.same([...step.value.weightMap.keys()], names)
  t.equal(step.value.weightMap.get(names[9]!), '2.safetensors')
  t.equal(step.value.files.length, 7)
})
