import { parentPort, workerData } from 'node:worker_threads'
import { errorMessage, RefitError } from '../errors.ts'
import { HuggingFaceTokenizer } from './hugging-face-tokenizer.ts'
import type { FromTextThread, TextJob, TextThreadData, ToTextThread } from './text-messages.ts'
import type { ChatMessage, ChatTemplateOptions } from './tokenizer.ts'

// The thread that reads long texts (background.ts), with a tokenizer of its own.

const { texts, ...files } = workerData as TextThreadData
const tokenizer = new HuggingFaceTokenizer({
  ...files,
  texts,
  tokenizer: JSON.parse(texts.tokenizer) as Record<string, unknown>,
  config: JSON.parse(texts.config) as Record<string, unknown>
})

parentPort!.on('message', ({ id, ...job }: ToTextThread) => {
  let reply: FromTextThread
  try {
    reply = { id, ...run(job) }
  } catch (error) {
    const { code, param } = error instanceof RefitError ? error : new RefitError('INTERNAL', '')
    reply = { id, code, error: errorMessage(error), param }
  }
  parentPort!.postMessage(reply, 'ids' in reply ? [reply.ids.buffer as ArrayBuffer] : [])
})

function run (job: TextJob): { ids: Int32Array } | { text: string } {
  if (job.type === 'encode') {
    return { ids: Int32Array.from(tokenizer.encode(job.text, { addSpecialTokens: job.addSpecialTokens })) }
  }
  const messages = JSON.parse(job.messages) as ChatMessage[]
  return { text: tokenizer.applyChatTemplate(messages, JSON.parse(job.options) as ChatTemplateOptions) }
}
