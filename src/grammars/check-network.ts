import type { Network } from './network.ts'
import { refusal } from './refuse.ts'

/**
 * Removes calls of rules that have no finite text. Throws if that leaves the root without one, or if a rule begins with
 * itself, because a matcher would call it without end.
 */
export function checkNetwork (network: Network, kind: string, names: readonly string[]): void {
  const finite = reached(network, true)
  if (!finite[0]) throw refusal(kind, 'the grammar has no finite text: every text would contain another one')
  for (const state of network.states) state.calls = state.calls.filter(({ rule }) => finite[rule])
  const empty = reached(network, false)
  const done = new Uint8Array(network.rules.length)
  // Depth first, without recursion: a chain of rules may be long.
  for (const root of network.rules.keys()) {
    const stack = [{ rule: root, calls: firstCalls(network, root, empty) }]
    if (done[root] === 2) continue
    done[root] = 1
    while (stack.length > 0) {
      const top = stack.at(-1)!
      const next = top.calls.pop()
      if (next === undefined) {
        done[top.rule] = 2
        stack.pop()
      } else if (done[next] === 1) {
        throw refusal(
          kind,
          `the rule ${
            names[next] ?? next
          } begins with itself; write the repetition with *, or put the rule behind a text`
        )
      } else if (done[next] === 0) {
        done[next] = 1
        stack.push({ rule: next, calls: firstCalls(network, next, empty) })
      }
    }
  }
}

/** Per rule: its end can be reached, with any bytes or (`withBytes` false) without a byte. */
function reached (network: Network, withBytes: boolean): boolean[] {
  const found = network.rules.map(() => false)
  const callers = callersOf(network)
  const queue = [...network.rules.keys()]
  for (let rule; (rule = queue.pop()) !== undefined;) {
    const { start, end } = network.rules[rule]!
    if (found[rule] === true || !walk(network, start, found, withBytes).has(end)) continue
    found[rule] = true
    queue.push(...callers[rule]!)
  }
  return found
}

function callersOf (network: Network): Set<number>[] {
  const callers = network.rules.map(() => new Set<number>())
  const all = network.rules.map(() => true)
  for (const [caller, { start }] of network.rules.entries()) {
    for (const state of walk(network, start, all, true)) {
      for (const { rule } of network.states[state]!.calls) callers[rule]!.add(caller)
    }
  }
  return callers
}

function firstCalls (network: Network, rule: number, empty: readonly boolean[]): number[] {
  const calls = new Set<number>()
  for (const state of walk(network, network.rules[rule]!.start, empty, false)) {
    for (const call of network.states[state]!.calls) calls.add(call.rule)
  }
  return [...calls]
}

/** States of a rule that are reached from one; calls are passed only for rules that have been `found`. */
function walk (network: Network, from: number, found: readonly boolean[], withBytes: boolean): Set<number> {
  const seen = new Set([from])
  for (const at of seen) {
    const { bytes, free, calls } = network.states[at]!
    for (const to of free) seen.add(to)
    for (const { rule, to } of calls) if (found[rule] === true) seen.add(to)
    if (withBytes) { for (const { to } of bytes) seen.add(to) }
  }
  return seen
}
