import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { ConfigFields } from '../../src/model/config-fields.ts'
import { parseRope } from '../../src/model/rope.ts'
import { goldenRoot } from '../helpers/goldens.ts'

interface RopeGolden {
  config: { rope_parameters: Record<string, unknown>, head_dim: number, max_position_embeddings?: number }
  inv_freq: number[]
  scale: number
}

const goldens: RopeGolden[] = JSON.parse(readFileSync(join(goldenRoot, 'rope.json'), 'utf8'))

function rope (config: Record<string, unknown>, headDim = 16, context = 512): ReturnType<typeof parseRope> {
  return parseRope(new ConfigFields(config), headDim, context)
}

for (const { config, inv_freq: theirs, scale } of goldens) {
  const { head_dim: headDim, max_position_embeddings: context = 512, rope_parameters: parameters } = config
  const { rope_theta: theta, rope_type: type, ...rest } = parameters
  const spellings = {
    'transformers 5': { rope_parameters: parameters },
    'transformers 4': { rope_theta: theta, rope_scaling: { rope_type: type, ...rest } },
    'older transformers 4': { rope_theta: theta, rope_scaling: { type, ...rest } },
    'nested by layer type': { rope_parameters: { full_attention: parameters } }
  }
  for (const [spelling, fields] of Object.entries(spellings)) {
    t.test(`${JSON.stringify(parameters)} gives transformers' frequencies, spelled as in ${spelling}`, async t => {
      const ours = rope(fields, headDim, context)
      t.equal(ours.ropeInvFreq.length, headDim / 2)
      const worst = Math.max(...theirs.map((f, i) => Math.abs(ours.ropeInvFreq[i]! / f - 1)))
      t.ok(worst < 2e-6, `relative error ${worst} (float32 against float64)`)
      t.ok(Math.abs(ours.ropeScale - scale) < 1e-12, 'attention factor')
    })
  }
}

t.test('the goldens cover every type and give each its own frequencies', async t => {
  t.same(
    new Set(goldens.map(golden => golden.config.rope_parameters.rope_type)),
    new Set(['default', 'linear', 'llama3', 'yarn'])
  )
  t.equal(
    new Set(goldens.map(golden => JSON.stringify([golden.inv_freq, golden.scale]))).size,
    goldens.length - 2,
    'two of yarn are the plain one: mscale alone counts for nothing, and a missing factor is the ratio of the lengths'
  )
})

t.test('without any RoPE field the base is 10000', async t => {
  t.same(rope({}).ropeInvFreq, rope({ rope_theta: 10_000 }).ropeInvFreq)
  t.same(rope({ rope_scaling: null, rope_theta: 5e5 }).ropeInvFreq[1], 5e5 ** (-2 / 16))
})

t.test('the original length defaults to max_position_embeddings, and one outside the object wins', async t => {
  const yarn = { rope_type: 'yarn', factor: 4, rope_theta: 10_000 }
  t.same(
    rope({ rope_parameters: yarn }, 16, 64),
    rope({ rope_parameters: { ...yarn, original_max_position_embeddings: 64 } }, 16, 512)
  )
  t.same(
    rope({ rope_parameters: { ...yarn, original_max_position_embeddings: 99 }, original_max_position_embeddings: 32 }),
    rope({ rope_parameters: { ...yarn, original_max_position_embeddings: 32 } })
  )
})

const llama3 = {
  rope_type: 'llama3',
  factor: 8,
  low_freq_factor: 1,
  high_freq_factor: 4,
  original_max_position_embeddings: 64
}
const refused: Array<[string, Record<string, unknown>, RegExp]> = [
  [
    'a dynamic type',
    { rope_scaling: { type: 'dynamic', factor: 2 } },
    /rope_scaling\.type: "dynamic" is not supported; refit knows default, linear, llama3, yarn/
  ],
  ['longrope', { rope_parameters: { rope_type: 'longrope' } }, /rope_parameters\.rope_type: "longrope"/],
  ['a type of another kind', { rope_parameters: { rope_type: 3 } }, /rope_type: expected a string, got 3/],
  ['half rotation', { partial_rotary_factor: 0.5 }, /partial_rotary_factor: 0.5 is not supported/],
  [
    'half rotation inside',
    { rope_parameters: { partial_rotary_factor: 0.25 } },
    /rope_parameters.partial_rotary_factor/
  ],
  ['a scaling that is a list', { rope_scaling: [1] }, /rope_scaling: expected an object, got \[1\]/],
  ['linear without a factor', { rope_parameters: { rope_type: 'linear' } }, /rope_parameters.factor: is missing/],
  [
    'a factor of zero',
    { rope_parameters: { rope_type: 'linear', factor: 0 } },
    /factor: expected a number above 0, got 0/
  ],
  [
    'a factor that is text',
    { rope_parameters: { rope_type: 'linear', factor: '2' } },
    /factor: expected a number, got "2"/
  ],
  ['a negative base', { rope_theta: -1 }, /rope_theta: expected a number above 0/],
  [
    'llama3 with swapped bounds',
    { rope_parameters: { ...llama3, low_freq_factor: 4 } },
    /high_freq_factor: expected more than low_freq_factor \(4\), got 4/
  ],
  [
    'llama3 without bounds',
    { rope_parameters: { ...llama3, low_freq_factor: undefined } },
    /low_freq_factor: is missing/
  ],
  [
    'yarn over base 1',
    { rope_parameters: { rope_type: 'yarn', factor: 2, rope_theta: 1 } },
    /rope_theta: expected a base other than 1/
  ],
  [
    'an original length of text',
    { rope_parameters: { ...llama3, original_max_position_embeddings: 'long' } },
    /original_max_position_embeddings: expected an integer/
  ]
]
for (const [what, config, message] of refused) {
  t.test(`RoPE with ${what} is refused by name`, async t => {
    t.throws(() => rope(config), { code: 'MODEL_CONFIG', message })
  })
}
