import t from 'tap'
import { inSlices } from '../../src/sources/disk/safetensors-tensors.ts'

/** Slices that take `ms` each. */
function* slices (count: number, ms: number): Generator<undefined, string, undefined> {
  for (let i = 0; i < count; i++) {
    const until = performance.now() + ms
    while (performance.now() < until);
    yield
  }
  return 'done'
}

async function turnsDuring (work: Promise<unknown>): Promise<number> {
  let turns = 0
  let isOver = false
  const turn = (): void => {
    turns++
    if (!isOver) setImmediate(turn)
  }
  setImmediate(turn)
  await work
  isOver = true
  return turns
}

t.test('other callbacks run between slices that take long', async t => {
  t.ok(await turnsDuring(inSlices(slices(10, 1))) >= 9)
})

t.test('the result is that of the generator, and so are its errors', async t => {
  t.equal(await inSlices(slices(3, 0)), 'done')
  t.equal(await inSlices(slices(3, 1)), 'done')

  function* failing (): Generator<undefined, string, undefined> {
    throw new Error('bad header')
  }
  await t.rejects(inSlices(failing()), { message: 'bad header' })
})
