import fc from 'fast-check'
import t from 'tap'
import { percentile, Values } from '../../src/load/distribution.ts'

t.test('percentiles of 1 to 1000 are the values of their ranks', t => {
  const values = new Values()
  for (let i = 1000; i > 0; i--) values.add(i)
  t.strictSame(values.summary(), { count: 1000, mean: 500.5, p50: 500, p90: 900, p99: 990, p999: 999, max: 1000 })
  t.end()
})

t.test('a value that is added many times counts as often', t => {
  const values = new Values()
  values.add(5, 3000)
  values.add(7)
  t.match(values.summary(), { count: 3001, p50: 5, p999: 5, max: 7 })
  t.end()
})

t.test('without values there is no percentile', t => {
  t.strictSame(new Values().summary(), { count: 0, mean: null, p50: null, p90: null, p99: null, p999: null, max: null })
  t.end()
})

t.test('a percentile is the smallest value that this part of all values does not exceed', t => {
  fc.assert(
    fc.property(
      fc.array(fc.integer({ min: 0, max: 50 }), { minLength: 1, maxLength: 120 }),
      fc.integer({ min: 1, max: 1000 }),
      (list, thousandths) => {
        const sorted = Float64Array.from(list).sort()
        const value = percentile(sorted, thousandths / 1000)
        const upTo = (limit: number): number => sorted.filter(item => item <= limit).length
        const below = sorted.filter(item => item < value).length
        return sorted.includes(value) && upTo(value) * 1000 >= thousandths * list.length &&
          below * 1000 < thousandths * list.length
      }
    )
  )
  t.end()
})
