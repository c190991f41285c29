import t from 'tap'
import { MEMORY_TAGS } from '../../src/native/addon.ts'
import { DELTA, DELTA_FIELDS, POSITIONS } from '../../src/native/deltas.ts'
import { bytesOf, DTYPES, dtypeOf, isHeld } from '../../src/native/dtypes.ts'
import { MESSAGE, MESSAGE_FIELDS, PART, PART_FIELDS } from '../../src/native/groups.ts'
import { native } from '../../src/native/load-addon.ts'
import { ROW_FLOATS, ROW_INTS, ROW_RAW_LOGPROB, ROW_WANT_LOGPROB } from '../../src/native/step.ts'
import {
  RECT,
  RECT_FIELDS,
  TENSOR,
  TENSOR_FIELDS,
  TENSOR_PARTIAL,
  TENSOR_UNTOUCHED,
  TENSOR_WRITTEN
} from '../../src/native/write-layout.ts'

const layouts = native().layouts

t.test('packed rows have the same fields in the same order in TypeScript and in the addon', async t => {
  for (
    const [name, fields, length] of [
      ['tensor', TENSOR, TENSOR_FIELDS],
      ['rect', RECT, RECT_FIELDS],
      ['delta', DELTA, DELTA_FIELDS],
      ['part', PART, PART_FIELDS],
      ['message', MESSAGE, MESSAGE_FIELDS]
    ] as const
  ) {
    t.same(Object.entries(fields), layouts[name].map((field, index) => [field, index]), name)
    t.equal(length, layouts[name].length, name)
  }
  t.same(layouts.step, {
    rowInts: ROW_INTS,
    rowFloats: ROW_FLOATS,
    wantLogprob: ROW_WANT_LOGPROB,
    rawLogprob: ROW_RAW_LOGPROB
  })
})

t.test('dtypes of weights have the same numbers, sizes and uses in TypeScript and in the addon', async t => {
  t.same(
    layouts.dtypes,
    Object.values(DTYPES).map(number => {
      const name = dtypeOf(number)
      return { name, bytes: bytesOf(name), held: isHeld(name) }
    })
  )
})

t.test('numbers of states, memory tags and encodings are the same in TypeScript and in the addon', async t => {
  t.same(layouts.tensorStates, {
    untouched: TENSOR_UNTOUCHED,
    partial: TENSOR_PARTIAL,
    written: TENSOR_WRITTEN
  })
  t.same(layouts.memoryTags, MEMORY_TAGS)
  t.same(layouts.positions, POSITIONS)
})
