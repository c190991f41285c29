import type { ErrorCode } from '../errors.ts'
import type { TokenizerFiles } from './tokenizer-files.ts'

// Messages between the main thread and the thread that reads long texts.

/** The parts of the thread's tokenizer. */
export type TextThreadData = Pick<TokenizerFiles, 'dir' | 'templates' | 'texts'>

export type TextJob =
  | { type: 'encode', text: string, addSpecialTokens: boolean }
  /** Messages and options as JSON text, which takes less time to send than a structured clone. */
  | { type: 'render', messages: string, options: string }

export type ToTextThread = { id: number } & TextJob

export type FromTextThread =
  | { id: number, ids: Int32Array }
  | { id: number, text: string }
  /** A refusal of the text, or INTERNAL. */
  | { id: number, code: ErrorCode, error: string, param: string | undefined }
