import type { GenerationContext } from '../http/context.ts'
import type { Sample } from '../http/generation/sample.ts'

/** Requests that are listed one by one; the versions count all. */
const SHOWN = 40
const PROMPT_TOKENS = 64
const TEXT = 300

export interface RunningRequest {
  id: string
  version: string
  /** Versions of its tokens so far. */
  versions: number
  tokens: number
  seconds: number
  adapter: string | null
  /** Only with --ui-prompts. */
  prompt?: string
  text?: string
}

/** Decoded once for each request. */
const PROMPTS = new WeakMap<Sample, string>()

/** The requests that generate, and how many of them there are for each version of their last token. */
export function runningRequests (
  { live, tokenizer }: Pick<GenerationContext, 'live' | 'tokenizer'>,
  showPrompts: boolean
): { versions: [version: string, requests: number][], requests: RunningRequest[] } {
  const versions = new Map<string, number>()
  const requests: RunningRequest[] = []
  for (const sample of live.samples) {
    if (sample.firstTokenAt === null || sample.finish !== null) continue
    versions.set(sample.weightVersion, (versions.get(sample.weightVersion) ?? 0) + 1)
    if (requests.length >= SHOWN) continue
    requests.push({
      id: sample.rid,
      version: sample.weightVersion,
      versions: sample.spans.length,
      tokens: sample.tokens.length,
      seconds: Math.round(sample.seconds * 10) / 10,
      adapter: sample.lora?.name ?? null,
      ...showPrompts ? { prompt: promptOf(sample, tokenizer), text: sample.text.slice(-TEXT) } : {}
    })
  }
  return { versions: [...versions], requests }
}

function promptOf (sample: Sample, tokenizer: GenerationContext['tokenizer']): string {
  let prompt = PROMPTS.get(sample)
  if (prompt !== undefined) return prompt
  const ids = sample.promptIds.slice(0, PROMPT_TOKENS)
  prompt = tokenizer === null ? ids.join(' ') : tokenizer.decode(ids)
  PROMPTS.set(sample, prompt)
  return prompt
}
