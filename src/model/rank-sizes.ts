import type { Architecture } from './architecture.ts'
import { RefitError } from '../errors.ts'

/** The part of an architecture that one rank holds, in rows (or columns) of its parameters. */
export interface RankSizes {
  ranks: number
  heads: number
  kvHeads: number
  /** Ranks that hold the same KV heads. */
  kvReplicas: number
  intermediate: number
  expertIntermediate: number
  /** Rows of o, down and every expert's w2. */
  outputs: number
  /**
   * Ranks gather the inputs of o, down and w2 and each computes some of their outputs, so every sum is made by one
   * rank. Else each computes with the inputs it has, and partial sums are added.
   */
  gathers: boolean
  /** Rows of the padded vocabulary. */
  vocab: number
}

// The same padding as in SGLang, so both servers have the same shards.
const VOCAB_MULTIPLE = 64

/** Splits an architecture over tensor-parallel ranks. Throws CONFIG with the numbers if it does not divide. */
export function rankSizes (arch: Architecture, ranks: number, gathers = false): RankSizes {
  if (!Number.isSafeInteger(ranks) || ranks < 1) throw misfit(`expected a positive number of ranks, got ${ranks}`)
  const divide = (n: number, what: string): number => {
    if (n % ranks !== 0) throw misfit(`${ranks} ranks do not divide ${n} ${what}`)
    return n / ranks
  }
  const heads = divide(arch.heads, 'attention heads (num_attention_heads)')
  if (arch.kvHeads % ranks !== 0 && ranks % arch.kvHeads !== 0) {
    throw misfit(
      `${arch.kvHeads} KV heads (num_key_value_heads) can neither be split over nor replicated to ${ranks} ranks evenly`
    )
  }
  const dense = arch.sparseLayers.includes(0)
  return {
    ranks,
    heads,
    kvHeads: Math.max(1, arch.kvHeads / ranks),
    kvReplicas: Math.max(1, ranks / arch.kvHeads),
    intermediate: dense ? divide(arch.intermediateSize, 'columns of the MLP (intermediate_size)') : 0,
    expertIntermediate: divide(arch.expertIntermediateSize, 'columns of an expert (moe_intermediate_size)'),
    outputs: gathers ? divide(arch.hiddenSize, 'columns of the hidden state (hidden_size)') : arch.hiddenSize,
    gathers,
    vocab: paddedVocab(arch.vocabSize, ranks) / ranks
  }
}

/** Columns of o, down or w2 on a rank that computes `own` of their inputs. */
export function inputColumns ({ ranks, gathers }: RankSizes, own: number): number {
  return gathers ? ranks * own : own
}

function paddedVocab (vocab: number, ranks: number): number {
  let multiple = VOCAB_MULTIPLE
  while (multiple % ranks !== 0) multiple += VOCAB_MULTIPLE
  return Math.ceil(vocab / multiple) * multiple
}

function misfit (message: string): RefitError {
  return new RefitError('CONFIG', `--tp: ${message}`, { param: 'tp' })
}
