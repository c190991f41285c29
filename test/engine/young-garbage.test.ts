import t from 'tap'
import { getHeapSpaceStatistics } from 'node:v8'
import { collectYoungGarbage } from '../../src/engine/young-garbage.ts'

function young (): { used: number, available: number } {
  const space = getHeapSpaceStatistics().find(({ space_name: name }) => name === 'new_space')!
  return { used: space.space_used_size, available: space.space_available_size }
}

t.test('young garbage is collected when there is much of it, and not before', async t => {
  let collected = 0
  let spared = 0
  for (let round = 0; round < 2000 && (collected < 5 || spared < 5); round++) {
    // Some 10 KB, so that V8's own collections come at other times than this one.
    Array.from({ length: 300 }, (_, i) => ({ round, i }))
    const before = young()
    const isDue = before.used > 3 * before.available
    collectYoungGarbage()
    const { used } = young()
    if (isDue && used < before.used / 2) collected++
    if (!isDue && used >= before.used) spared++
  }
  t.equal(collected, 5)
  t.ok(spared >= 5)
  t.notOk('gc' in globalThis, 'other code does not see the collector')
})
