import { readAll } from '../remote/connection.ts'
import type { Worker } from './worker.ts'

/** A silent engine delays a scrape by this much. */
const SCRAPE_MS = 2000

/** The text of one family: its HELP and TYPE lines, and its samples. */
interface Family {
  head: string[]
  samples: string[]
}

/**
 * The metrics of the engines in one text, each sample with the label `worker_addr` as SGLang's router writes it.
 * vLLM's label `engine` is numbered through, because two engines would both be 0. `prefixes`: the families to keep.
 * Engines that do not reply are left out.
 */
export async function engineMetrics (workers: readonly Worker[], prefixes: readonly string[] = ['']): Promise<string> {
  const texts = await Promise.all(workers.map(scrape))
  const families = new Map<string, Family>()
  const engines = new Map<string, number>()
  for (const [i, { url }] of workers.entries()) {
    for (const { name, head, samples } of familiesOf(texts[i]!)) {
      if (!prefixes.some(prefix => name.startsWith(prefix))) continue
      let family = families.get(name)
      if (family === undefined) families.set(name, family = { head, samples: [] })
      for (const sample of samples) family.samples.push(labelled(sample, url, engines))
    }
  }
  return [...families.values()].map(({ head, samples }) => [...head, ...samples, ''].join('\n')).join('\n')
}

async function scrape ({ connection, isServed }: Worker): Promise<string> {
  if (!isServed) return ''
  try {
    const { statusCode, body } = await connection.request({
      method: 'GET',
      path: '/metrics',
      signal: AbortSignal.timeout(SCRAPE_MS)
    })
    const text = String(await readAll(body))
    return statusCode === 200 ? text : ''
  } catch {
    return ''
  }
}

/** Samples belong to the TYPE line before them: a histogram's series have other names than the histogram. */
function familiesOf (text: string): (Family & { name: string })[] {
  const families: (Family & { name: string })[] = []
  let help: string[] = []
  for (const line of text.split('\n')) {
    if (line.startsWith('# HELP ')) help = [line]
    else if (line.startsWith('# TYPE ')) {
      families.push({ name: line.split(' ', 3)[2]!, head: [...help, line], samples: [] })
      help = []
    } else if (line !== '' && !line.startsWith('#')) families.at(-1)?.samples.push(line)
  }
  return families
}

function labelled (sample: string, url: string, engines: Map<string, number>): string {
  const [, name = '', labels = '', rest = ''] = /^([^{\s]+)(?:\{(.*)\})?(\s.*)$/.exec(sample) ?? []
  const numbered = labels.replace(/(^|,)engine="([^"]*)"/, (_, comma: string, own: string) => {
    const key = `${url} ${own}`
    if (!engines.has(key)) engines.set(key, engines.size)
    return `${comma}engine="${engines.get(key)}"`
  })
  return `${name}{${numbered}${numbered === '' || numbered.endsWith(',') ? '' : ','}worker_addr="${url}"}${rest}`
}
