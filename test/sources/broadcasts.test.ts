import fc from 'fast-check'
import t from 'tap'
import { cutBroadcasts, placeTensors } from '../../src/sources/distributed/broadcasts.ts'
import { measureTensors } from '../../src/sources/measure-tensors.ts'

const of = (bytes: readonly number[]) =>
  bytes.map((size, index) => ({ name: String(index), dtype: 'uint8', shape: [size], bytes: size }))
const sum = (numbers: readonly number[]): number => numbers.reduce((a, b) => a + b, 0)

t.test('a chunk ends after the tensor with which its bytes exceed the buffer, whatever the sizes are', async t => {
  // vLLM's rule has these results: chunks hold all tensors in order, each chunk except the last one exceeds the buffer,
  // and no chunk exceeds it without its last tensor.
  fc.assert(fc.property(fc.array(fc.nat(40), { maxLength: 40 }), fc.nat(100), (bytes, bufferBytes) => {
    const tensors = of(bytes)
    const { sizes, spans } = cutBroadcasts(tensors, { bufferBytes })
    const chunks = spans.map(([first, end]) => bytes.slice(first, end))
    return JSON.stringify(chunks.flat()) === JSON.stringify(bytes) &&
      chunks.every(chunk => chunk.length > 0 && sum(chunk.slice(0, -1)) <= bufferBytes) &&
      chunks.slice(0, -1).every(chunk => sum(chunk) > bufferBytes) &&
      JSON.stringify(chunks.map(sum)) === JSON.stringify(sizes)
  }))
})

t.test('a buffer that is exactly full gets one more tensor, which may be larger than the buffer', async t => {
  const cut = (bytes: number[], bufferBytes: number): unknown => cutBroadcasts(of(bytes), { bufferBytes }).sizes
  t.same(cut([4, 4, 9, 1], 8), [17, 1])
  t.same(cut([4, 4, 1], 8), [9])
  t.same(cut([100, 1, 1], 8), [100, 2])
  t.same(cut([0, 0, 5], 0), [5], 'empty tensors exceed nothing')
  t.same(cut([5, 0], 0), [5, 0], 'and are a chunk of their own behind the last')
  t.same(cut([], 8), [])
})

t.test('a broadcast holds one tensor, or all of them', async t => {
  const tensors = measureTensors(['a', 'b', 'c'], ['bfloat16', 'torch.float32', 'uint8'], [[3], [2, 2], []])
  t.same(cutBroadcasts(tensors, 'each').sizes, [6, 16, 1])
  t.same(cutBroadcasts(tensors, 'whole'), { sizes: [23], spans: [[0, 3]] })
  t.same(cutBroadcasts([], 'whole'), { sizes: [], spans: [] })
})

t.test('tensors lie in their broadcast without gaps, at odd bytes too, whatever its first byte is', async t => {
  const tensors = measureTensors(['a', 'b', 'c', 'd'], ['uint8', 'bfloat16', 'bfloat16', 'float32'], [[3], [4], [1], [
    1
  ]])
  const broadcasts = cutBroadcasts(tensors, { bufferBytes: 10 })
  t.same(broadcasts, { sizes: [11, 6], spans: [[0, 2], [2, 4]] })
  t.same(placeTensors(tensors, broadcasts, [0, 256]), [0, 3, 256, 258])
})
