import type { KeptSamples } from './kept-samples.ts'

/** How a client gets samples that are kept. */
export function whereKept ({ limit, rule }: KeptSamples): string {
  if (limit === 0) return 'this server keeps none (--samples-memory 0)'
  const which = rule === 'all' ? '' : ' of requests with "receipt": true'
  return `the last samples${which} are kept, up to ${limit} bytes (--samples-memory)`
}
