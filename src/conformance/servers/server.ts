import type { HttpTarget, Reply } from '../http-target.ts'
import type { Way } from '../promise.ts'

/** Output tokens [start, end) that the server attributes to a weight version. */
export interface VersionSpan {
  version: string
  start: number
  end: number
}

export interface Answer {
  tokens: number[]
  logprobs: number[]
  /** Null if the answer names no version. */
  versions: VersionSpan[] | null
  /** `abort`: ended by the server before the requested length. */
  finish: string
}

export interface GenerateOptions {
  /** Number of tokens; ends of sequences are ignored. */
  tokens: number
  signal?: AbortSignal
}

/** The fate of running requests during a pause. */
export type PauseEffect = 'abort' | 'recompute' | 'freeze' | 'finish'

export interface PauseMode extends Way {
  readonly effect: PauseEffect
}

export interface GroupFields {
  address: string
  port: number
  worldSize: number
  name: string
}

/** Tensors that a trainer announces before it broadcasts them. */
export interface BroadcastLists {
  names: string[]
  dtypes: string[]
  shapes: number[][]
}

/**
 * The routes of one kind of server. Methods that return a Reply do not throw for a refusal; the others throw Broken for
 * it.
 */
export interface Server {
  readonly kind: 'sglang' | 'vllm'
  readonly target: HttpTarget
  readonly pauseModes: readonly PauseMode[]
  /** Ranks that join a process group. */
  ranks: () => Promise<number>
  /** The checkpoint that it says it serves; null if it names none. */
  modelPath: () => Promise<string | null>
  /** The weight version; null if the server has none. */
  label: () => Promise<string | null>
  /** Moves the label alone. */
  setLabel: (label: string) => Promise<Reply>
  /** Logprobs of tokens 1.. of a prompt, each given all before it, computed without a prefix cache. */
  score: (ids: readonly number[]) => Promise<number[]>
  /** The reply of a short greedy request, whatever it is. */
  tryGenerate: (ids: readonly number[], options: GenerateOptions) => Promise<Reply>
  /** A greedy answer. */
  generate: (ids: readonly number[], options: GenerateOptions) => Promise<Answer>
  pause: (mode: string) => Promise<Reply>
  resume: () => Promise<Reply>
  health: (timeoutMs?: number) => Promise<Reply>
  releaseMemory: () => Promise<Reply>
  resumeMemory: () => Promise<Reply>
  /** One text that is equal if and only if all weights are; null if the server has no such route. */
  digest: () => Promise<string | null>
  /** Values of a tensor's first rows in order; null if the server cannot read it back. */
  readBack: (name: string, rows: number) => Promise<number[] | null>
  initGroup: (fields: GroupFields, timeoutMs?: number) => Promise<Reply>
  destroyGroup: (name: string) => Promise<Reply>
  /** An update through a group. It replies once the tensors have arrived. */
  receive: (group: string, lists: BroadcastLists, label: string | undefined) => Promise<Reply>
  loadFolder: (path: string, label: string | undefined) => Promise<Reply>
  /** Ends an update that failed before its end, as a trainer would that starts again. */
  giveUp: () => Promise<void>
}
