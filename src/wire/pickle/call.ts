import { limited, malformed, refused } from './error.ts'
import { PickleBytes, PickleDict, PickleList, PickleObject, PickleSet } from './values.ts'
import type { PickleName, PickleTuple, PickleValue } from './values.ts'

/** How many bytes may yet come out of strings: what a pickler wrote once is asked for once, and one string must not grow without end. */
export interface TextBudget {
  left: number
}

/**
 * What REDUCE at byte `at` leaves of a name and its arguments: for a function a record that it was met, for Python's own ways of
 * writing bytes, sets, dicts and tuples the value. Throws PICKLE_REFUSED for arguments that no pickler writes.
 */
export function reducePickle (callee: PickleName, args: PickleTuple, budget: TextBudget, at: number): PickleValue {
  const only = args.length === 1 ? args[0] : undefined
  switch (callee.use) {
    case 'call':
      return new PickleObject(callee, args)
    case 'tuple':
      if (Array.isArray(only)) return only
      break
    case 'dict':
      if (args.length === 0) return new PickleDict()
      break
    case 'set':
      if (only instanceof PickleList) return new PickleSet(only.items)
      break
    case 'bytes':
      if (args.length === 0) return new PickleBytes(Buffer.alloc(0), 0, 0)
      if (only instanceof PickleBytes) return only
      break
    case 'latin1':
      if (args.length === 2 && typeof args[0] === 'string' && args[1] === 'latin1') return encode(args[0], budget, at)
      break
    default:
      throw refused(`REDUCE calls ${callee.module}.${callee.name}, which stands for itself only`, at)
  }
  throw refused(`${callee.module}.${callee.name} with arguments that no pickler writes`, at)
}

function encode (text: string, budget: TextBudget, at: number): PickleBytes {
  budget.left -= text.length
  if (budget.left < 0) throw limited('more bytes come out of its strings than it has', at)
  for (let i = 0; i < text.length; i++) {
    if (text.charCodeAt(i) > 0xff) throw malformed('bytes as text hold a character past U+00FF', at)
  }
  return new PickleBytes(Buffer.from(text, 'latin1'), 0, text.length)
}
