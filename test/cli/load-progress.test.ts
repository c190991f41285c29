import t from 'tap'
import { LoadProgress } from '../../src/cli/load-progress.ts'

function setup (
  isTTY: boolean
): { progress: LoadProgress, drawn: string[], logged: string[], tick: (ms: number) => void } {
  const drawn: string[] = []
  const logged: string[] = []
  let now = 0
  const progress = new LoadProgress({ isTTY, write: text => drawn.push(text) }, line => logged.push(line), () => now)
  return {
    progress,
    drawn,
    logged,
    tick: ms => {
      now += ms
    }
  }
}

t.test('on a terminal a bar is repainted at most ten times a second and removed at the end', async t => {
  const { progress, drawn, logged, tick } = setup(true)
  for (let i = 0; i <= 1000; i++) {
    progress.update(i * 1e6, 1e9)
    tick(1)
  }
  t.equal(drawn.length, 11)
  t.match(drawn[5], /loading .* 50 % of 1\.00 GB, 1\.00 GB\/s$/)
  t.match(drawn.at(-1), /\[={30}\] 100 %/)
  progress.end()
  t.equal(drawn.at(-1), '\r\x1b[K')
  progress.end()
  t.equal(drawn.length, 12)
  t.same(logged, [])
})

t.test('without a terminal there is one line for every tenth, and none for a load that takes no time', async t => {
  const slow = setup(false)
  for (let i = 0; i <= 100; i++) {
    slow.progress.update(i, 100)
    slow.tick(200)
  }
  slow.progress.end()
  t.equal(slow.logged.length, 10)
  t.match(slow.logged[4], /^loading: 50 % /)
  t.same(slow.drawn, [])
  const quick = setup(false)
  for (let i = 0; i <= 100; i++) quick.progress.update(i, 100)
  t.same(quick.logged, [])
})

t.test('a total of 0, and progress beyond the total, show 100 %', async t => {
  const { progress, drawn } = setup(true)
  progress.update(0, 0)
  progress.update(20, 10)
  t.ok(drawn.every(line => line.includes('100 %')))
})
