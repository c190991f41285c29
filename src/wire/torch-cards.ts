import { PickleDict } from './pickle-values.ts'
import type { PickleValue } from './pickle-values.ts'
import { payloadError } from './torch-tensor.ts'

// One tensor on several cards: vLLM's senders gather the handles of all training ranks into {UUID of the card: handle}, and each of
// the engine's ranks takes the one of its own card.

const UUID = /^(?:gpu-|mig-)?([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$/

/** The UUID of a card in lower case, without `GPU-` or `MIG-`; undefined for what is none. */
export function toCardUuid (text: string): string | undefined {
  return UUID.exec(text.toLowerCase())?.[1]
}

/** A dict that is not empty and has nothing but UUIDs for keys. */
export function isCardDict (value: PickleValue | undefined): value is PickleDict {
  return value instanceof PickleDict && value.size > 0 && value.keys.every(key => typeof key === 'string' && toCardUuid(key) !== undefined)
}

/**
 * The handle for the rank that has `card`: the one of its card; the only one, which is read over NVLink where it is another's; or,
 * for an engine without cards, the first. Throws TENSOR_PAYLOAD where there are others alone.
 */
export function pickCard (dict: PickleDict, card: string | undefined): { device: string, handle: PickleValue } {
  const cards = dict.keys.map(key => toCardUuid(key as string)!)
  const index = cards.length === 1 || card === undefined ? 0 : cards.lastIndexOf(card)
  if (index === -1) throw payloadError(`it is offered on the cards ${cards.slice(0, 16).join(', ')}, and this rank has ${card}: sender and server must run on the same ones`)
  return { device: cards[index]!, handle: dict.values[index]! }
}
