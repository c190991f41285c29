import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { isHeld } from '../../native/dtypes.ts'
import { readValues } from '../../native/held-values.ts'
import { definePromise, expect, NotOffered } from '../promise.ts'
import { difference } from '../references.ts'
import type { Tensor } from '../checkpoint.ts'

const GROUP = 'identity'
/** A large checkpoint is sent in this many parts, so that the number of updates stays small. */
const MOST_PARTS = 48
const MOST_READ = 24
const ROWS = 4
/** bfloat16 has 8 bits of precision. */
const ROUNDING = 2 ** -8

export const roundTrip = definePromise(GROUP, 'round-trip', {
  title: 'After B, A, C, A the server answers as with B, A, C, A.',
  ways: everyTransport(),
  check: async (context, transport) => {
    for (const name of ['B', 'A', 'C', 'A'] as const) {
      await context.load(name, transport)
      await context.expectServing(name, `after a whole update to ${name}`)
    }
    return 'four updates'
  }
})

export const repeat = definePromise(GROUP, 'repeat', {
  title: 'The same update twice leaves what the first one left.',
  ways: everyTransport(),
  check: async (context, transport) => {
    await context.load('B', transport)
    await context.load('B', transport)
    await context.expectServing('B', 'after the second update to B')
    return undefined
  }
})

export const parts = definePromise(GROUP, 'parts', {
  title: 'Each part of B changes the weights, and all parts together are B.',
  ways: everyTransport(({ takesParts }) => takesParts),
  check: async (context, transport) => {
    const { tensors } = context.variants.B
    const size = Math.ceil(tensors.length / MOST_PARTS)
    const idle: string[] = []
    let last = await context.references.fingerprint(context.server)
    for (let at = 0; at < tensors.length; at += size) {
      const part = tensors.slice(at, at + size)
      const reply = await transport.send(part)
      expect(reply.ok, `the part with ${part[0]!.name} was refused: ${reply.text}`)
      const now = await context.references.fingerprint(context.server)
      const isSame = now.digest === null ? difference(now.scores, last.scores) === 0 : now.digest === last.digest
      if (isSame && part.some(tensor => isVisible(context, tensor, now.digest !== null))) idle.push(part[0]!.name)
      last = now
    }
    expect(idle.length === 0, `${idle.length} parts changed nothing: ${idle.slice(0, 3).join(', ')}`)
    await context.expectServing('B', 'after all parts of B')
    return `${Math.ceil(tensors.length / size)} parts`
  }
})

/** Whether a changed tensor must show. */
function isVisible ({ model }: Context, { name, dtype }: Tensor, hasDigest: boolean): boolean {
  if (model.isTied && name.startsWith('lm_head')) return false
  // The fixed prompts may not reach an expert, so only a checksum shows it.
  if (!hasDigest && name.includes('experts')) return false
  return isHeld(dtype)
}

export const readBack = definePromise(GROUP, 'read-back', {
  title: 'The server reads back the values that were sent.',
  ways: everyTransport(),
  check: async (context, transport) => {
    await context.load('B', transport)
    const { tensors } = context.variants.B
    const step = Math.ceil(tensors.length / MOST_READ)
    let read = 0
    for (const { name, dtype, shape, bytes } of tensors.filter((_, i) => i % step === 0)) {
      const values = await context.server.readBack(name, ROWS)
      if (values === null || !isHeld(dtype)) continue
      const sent = readValues(dtype, bytes())
      const columns = shape.slice(1).reduce((a, b) => a * b, 1)
      const rows = sent.subarray(0, Math.min(shape[0] ?? 1, ROWS) * columns)
      const first = values.slice(0, rows.length)
      const wrong = rows.findIndex((value, i) => Math.abs(first[i]! - value) > Math.abs(value) * ROUNDING)
      expect(first.length === rows.length, `${name} has ${values.length} values, not ${rows.length}`)
      expect(wrong < 0, `element ${wrong} of ${name} is ${first[wrong]}, and ${rows[wrong]} was sent`)
      read++
    }
    if (read === 0) throw new NotOffered('no route reads weights by name')
    return `${read} tensors`
  }
})
