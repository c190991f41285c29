import fc from 'fast-check'
import t from 'tap'
import { readStateDictMetadata } from '../../../src/wire/trainers/prime-rl-metadata.ts'

/**
 * `pickle.dumps({torch.bfloat16: [("a.weight", torch.Size([2, 3]), 6), ("b", torch.Size([]), 1)], torch.float32: [("c",
 * torch.Size([4]), 4)]})`, protocol 4, torch 2.13.
 */
const RECORDED = Buffer.from(
  '8004957a000000000000007d94288c05746f726368948c0862666c6f617431369493945d94288c08612e776569676874948c' +
    '05746f726368948c0453697a659493944b024b038694859452944b0687948c016294680829859452944b0187946568018c07' +
    '666c6f617433329493945d948c01639468084b048594859452944b04879461752e',
  'hex'
)

t.test('names, dtypes and shapes are read in the order in which they are sent', async t => {
  t.same(readStateDictMetadata(RECORDED), {
    names: ['a.weight', 'b', 'c'],
    dtypes: ['bfloat16', 'bfloat16', 'float32'],
    shapes: [[2, 3], [], [4]]
  })
})

t.test('other pickles are refused, and no name in them is called', async t => {
  const text = (value: string): string =>
    `8c${Buffer.from([value.length]).toString('hex')}${Buffer.from(value).toString('hex')}`
  const refused: Array<[pickle: string, code: string]> = [
    ['80044e2e', 'TENSOR_PAYLOAD'],
    [`8004${text('os')}${text('system')}93${text('id')}85522e`, 'PICKLE_REFUSED'],
    [`8004${text('torch')}${text('device')}93${text('cpu')}85522e`, 'PICKLE_REFUSED'],
    [`80047d${text('bfloat16')}5d732e`, 'TENSOR_PAYLOAD'],
    [`80047d${text('torch')}${text('bfloat16')}934e732e`, 'TENSOR_PAYLOAD'],
    // The shape has another number of elements than the pickle states.
    [`80047d${text('torch')}${text('bfloat16')}935d${text('a')}4b0285${'4b03'}8761732e`, 'TENSOR_PAYLOAD'],
    ['', 'PICKLE_MALFORMED']
  ]
  for (const [pickle, code] of refused) {
    t.throws(() => readStateDictMetadata(Buffer.from(pickle, 'hex')), { code }, pickle)
  }
})

t.test('a changed byte gives a refusal or other data', async () => {
  fc.assert(
    fc.property(fc.nat(RECORDED.length - 1), fc.integer({ min: 1, max: 255 }), (at, change) => {
      const bytes = Buffer.from(RECORDED)
      bytes[at]! ^= change
      try {
        const { names, dtypes, shapes } = readStateDictMetadata(bytes)
        return names.length === dtypes.length && names.length === shapes.length
      } catch (error) {
        return /^(PICKLE_|TENSOR_PAYLOAD)/.test((error as { code: string }).code)
      }
    }),
    { numRuns: 2000 }
  )
})
