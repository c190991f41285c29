import type { Expression } from './expression.ts'
import type { Network } from './network.ts'

/**
 * Adds an `until` expression: the automaton of Aho and Corasick ("Efficient string matching", 1975), which knows after
 * each byte the longest beginning of an end that the text ends with.
 */
export function addUntil (
  network: Network,
  { ends, open }: Expression & { type: 'until' },
  from: number,
  to: number
): void {
  const texts = ends.map(end => Buffer.from(end.text))
  // A node is a beginning of an end. Latin-1 keeps bytes as characters.
  const nodes = new Map<string, number>([['', network.state()]])
  for (const bytes of texts) {
    for (let length = 1; length < bytes.length; length++) {
      const key = bytes.toString('latin1', 0, length)
      if (!nodes.has(key)) nodes.set(key, network.state())
    }
  }
  network.states[from]!.free.push(nodes.get('')!)
  const keys = texts.map(bytes => bytes.toString('latin1'))
  const used = [...new Set(keys.join('').split(''))].map(char => char.charCodeAt(0)).sort((a, b) => a - b)
  for (const [key, state] of nodes) {
    const { bytes, free } = network.states[state]!
    if (open) free.push(to)
    let next = 0
    for (const byte of used) {
      if (byte > next) bytes.push({ first: next, last: byte - 1, to: nodes.get('')! })
      next = byte + 1
      const seen = key + String.fromCharCode(byte)
      const end = keys.findIndex(end => seen.endsWith(end))
      if (end >= 0) {
        const after = network.state()
        bytes.push({ first: byte, last: byte, to: after })
        network.add(ends[end]!.then, after, to)
        continue
      }
      let rest = seen
      while (!nodes.has(rest)) rest = rest.slice(1)
      bytes.push({ first: byte, last: byte, to: nodes.get(rest)! })
    }
    if (next < 256) bytes.push({ first: next, last: 255, to: nodes.get('')! })
  }
}
