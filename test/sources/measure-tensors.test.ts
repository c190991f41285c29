import t from 'tap'
import { measureTensors } from '../../src/sources/measure-tensors.ts'

t.test('bytes equal those of torch, by canonical name, by alias and with torch. before it', async t => {
  for (
    const [text, name, bytes] of [
      ['bfloat16', 'bfloat16', 2],
      ['torch.bfloat16', 'bfloat16', 2],
      ['half', 'float16', 2],
      ['torch.float', 'float32', 4],
      ['float64', 'float64', 8],
      ['long', 'int64', 8],
      ['uint8', 'uint8', 1],
      ['bool', 'bool', 1],
      ['float8_e4m3fn', 'float8_e4m3fn', 1],
      ['complex64', 'complex64', 8]
    ] as const
  ) {
    t.same(
      measureTensors(['a'], [text], [[3, 5]]),
      [{ name: 'a', dtype: name, shape: [3, 5], bytes: 15 * bytes }],
      text
    )
  }
  t.same(
    measureTensors(['a', 'b'], ['float32', 'float32'], [[], [0, 7]]).map(({ bytes }) => bytes),
    [4, 0],
    'a scalar, and a tensor of nothing'
  )
  t.same(measureTensors([], [], []), [])
})

t.test('a tensor whose size is unknown is refused with its field', async t => {
  const refused: [string[], string[], number[][], string, RegExp][] = [
    [['a', 'b'], ['bfloat16'], [[1], [1]], 'dtypes', /2, 1 and 2 entries/],
    [['a'], ['bfloat16'], [], 'shapes', /1, 1 and 0 entries/],
    [['a'], ['bf16'], [[1]], 'dtypes', /"bf16" of "a" is not a dtype/],
    [['a'], ['__class__'], [[1]], 'dtypes', /not a dtype/],
    [['a'], ['qint8'], [[1]], 'dtypes', /not a dtype/],
    [['a'], ['bfloat16'], [[2, -1]], 'shapes', /\[2, -1\] of "a"/],
    [['a'], ['bfloat16'], [[1.5]], 'shapes', /whole numbers/],
    [['a'], ['bfloat16'], [[2 ** 30, 2 ** 30]], 'shapes', /too big/],
    [['a', 'b'], ['uint8', 'uint8'], [[2 ** 52], [2 ** 52]], 'shapes', /"b" is too big/]
  ]
  for (const [names, dtypes, shapes, param, message] of refused) {
    t.throws(() => measureTensors(names, dtypes, shapes), { code: 'INVALID_REQUEST', param, message })
  }
})
