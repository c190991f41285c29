import t from 'tap'
import { drawLength, parseLengths } from '../../src/load/lengths.ts'
import type { Lengths } from '../../src/load/lengths.ts'
import { promptIds, promptText, usualIds } from '../../src/load/prompts.ts'
import { randomFrom } from '../../src/load/random.ts'
import { arrivals } from '../../src/load/run-load.ts'

function draws (lengths: Lengths, count: number): number[] {
  const random = randomFrom(7, 0)
  return Array.from({ length: count }, () => drawLength(lengths, random))
}

const mean = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length

t.test('lengths are read, and wrong ones are refused with what was expected', t => {
  t.strictSame(parseLengths('512', '--prompt'), { kind: 'fixed', tokens: 512 })
  t.strictSame(parseLengths('fixed:1', '--prompt'), { kind: 'fixed', tokens: 1 })
  t.strictSame(parseLengths('uniform:3-9', '--prompt'), { kind: 'uniform', least: 3, most: 9 })
  t.strictSame(parseLengths('exponential:100', '--prompt'), { kind: 'exponential', mean: 100, most: 800 })
  t.strictSame(parseLengths('exponential:100-300', '--prompt'), { kind: 'exponential', mean: 100, most: 300 })
  for (
    const text of ['', '0', '-1', '1.5', 'uniform:9-3', 'uniform:0-3', 'exponential:9-3', 'normal:3', '99999999999']
  ) {
    t.throws(() => parseLengths(text, '--output'), { code: 'CONFIG', message: /--output: expected 512, uniform/ }, text)
  }
  t.end()
})

t.test('draws have the distribution that was asked for', t => {
  t.strictSame(draws({ kind: 'fixed', tokens: 4 }, 3), [4, 4, 4])
  const uniform = draws({ kind: 'uniform', least: 10, most: 13 }, 4000)
  for (const value of [10, 11, 12, 13]) {
    const count = uniform.filter(item => item === value).length
    t.ok(count > 850 && count < 1150, `${value} was drawn ${count} times`)
  }
  t.equal(uniform.filter(value => value < 10 || value > 13).length, 0)
  const spread = draws({ kind: 'exponential', mean: 200, most: 1600 }, 20_000)
  t.ok(Math.abs(mean(spread) - 200) < 8, `mean ${mean(spread)}`)
  // In an exponential distribution, 1/e of all draws are longer than the mean.
  t.ok(Math.abs(spread.filter(value => value > 200).length / 20_000 - Math.exp(-1)) < 0.02)
  t.ok(Math.min(...spread) >= 1 && Math.max(...spread) <= 1600)
  t.end()
})

t.test('arrivals are a Poisson process: mean and spread of their gaps are equal', t => {
  const gaps: number[] = []
  let before = 0
  let isFirst = true
  for (const at of arrivals(50, 3)) {
    if (!isFirst) gaps.push(at - before)
    isFirst = false
    before = at
    if (gaps.length === 20_000) break
  }
  const average = mean(gaps)
  const deviation = Math.sqrt(mean(gaps.map(gap => (gap - average) ** 2)))
  t.ok(Math.abs(average - 20) < 0.6, `mean ${average} ms`)
  t.ok(Math.abs(deviation - 20) < 0.8, `standard deviation ${deviation} ms`)
  t.end()
})

t.test('the same seed draws the same prompts, and another seed others', t => {
  const range = usualIds(null)
  t.strictSame(promptIds(1, 4, 50, 0, range), promptIds(1, 4, 50, 0, range))
  t.notSame(promptIds(1, 4, 50, 0, range), promptIds(1, 5, 50, 0, range))
  t.notSame(promptIds(1, 4, 50, 0, range), promptIds(2, 4, 50, 0, range))
  const [one, other] = [promptIds(1, 4, 50, 20, range), promptIds(1, 5, 60, 20, range)]
  t.strictSame(one.slice(0, 20), other.slice(0, 20))
  t.not(one[20], other[20])
  t.end()
})

t.test('prompts stay inside the vocabulary', t => {
  for (const vocabulary of [null, 151_936, 260, 10]) {
    const range = usualIds(vocabulary)
    const ids = promptIds(1, 0, 5000, 0, range)
    t.ok(Math.min(...ids) >= 0 && Math.max(...ids) < (vocabulary ?? 10_000), String(vocabulary))
    t.equal(promptText(ids).split(' ').length, 5000)
  }
  t.end()
})
