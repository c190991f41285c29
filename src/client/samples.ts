/** Everything that made a sample: the reply of `GET /samples/ID`. */
export interface SampleReceipt {
  receipt: 1
  id: string
  prompt_ids: number[]
  output_ids: number[]
  logprobs: (number | null)[] | null
  sampling_params: Record<string, unknown>
  weight_versions: { version: string, start: number, end: number }[]
  weights: { digest?: string | null, state: 'current' | 'gone' | 'mixed' }
  seal: string
  [key: string]: unknown
}

/** A trainer's logprobs of the output of a sample. */
export interface TruthClaim {
  id: string
  logprobs: readonly number[]
  output_ids?: readonly number[]
}

export interface TruthDifferences {
  tokens: number
  mean: number
  max: number
  p99: number
  kl: number
  clipped: number
}

export interface TruthReport extends TruthDifferences {
  samples: number
  versions: (TruthDifferences & { version: string })[]
}
