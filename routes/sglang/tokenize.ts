import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { MAX_BATCH } from '../../src/http/limits.ts'
import { decodeInTurns, idsOfTexts, needTokenizer } from '../../src/http/generation/prompts.ts'
import { LazyList, sendJson } from '../../src/http/json-parts.ts'
import { chatFields, Message, promptFields, readPrompt } from '../../src/http/openai/chat-prompt.ts'
import { invalid, refuseFields } from '../../src/http/refuse.ts'
import { nullable, refusals, refused, TokenIds } from '../../src/http/schemas.ts'

const TokenizeBody = Type.Object({
  model: nullable(Type.String(), 'Any name, because there is one model.'),
  prompt: nullable(
    Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: MAX_BATCH })]),
    'Text or a batch of texts.'
  ),
  messages: nullable(Type.Array(Message, { minItems: 1 }), 'A conversation instead of a prompt.'),
  ...chatFields,
  ...promptFields,
  add_special_tokens: nullable(
    Type.Boolean(),
    'Default true. For a conversation false, because its template adds special tokens.'
  ),
  return_token_strs: nullable(Type.Boolean(), 'Send `token_strs`, the text of each token.'),
  chat_template: refused('templates in requests'),
  media_io_kwargs: refused('images and other media'),
  mm_processor_kwargs: refused('images and other media')
}, { title: 'TokenizeRequest' })

const Tokens = Type.Object({
  tokens: Type.Union([TokenIds, Type.Array(TokenIds)]),
  count: Type.Union([Type.Integer(), Type.Array(Type.Integer())]),
  max_model_len: Type.Integer(),
  token_strs: Type.Optional(Type.Union([Type.Array(Type.String()), Type.Array(Type.Array(Type.String()))]))
}, { title: 'Tokens', description: 'Token ids; lists of them for a batch.' })

const DetokenizeBody = Type.Object({
  model: nullable(Type.String(), 'Any name, because there is one model.'),
  tokens: Type.Union([TokenIds, Type.Array(TokenIds, { maxItems: MAX_BATCH })]),
  skip_special_tokens: nullable(
    Type.Boolean(),
    'Default: `text` has no special tokens, as in SGLang, and `prompt` has them, as in vLLM.'
  )
}, { title: 'DetokenizeRequest' })

const Text = Type.Union([Type.String(), Type.Array(Type.String())])
const Texts = Type.Object({ text: Text, prompt: Text }, {
  title: 'Detokenized',
  description: "The text: `text` is SGLang's field, `prompt` is vLLM's."
})

/** Text to token ids and back. */
const tokenize: Routes<GenerationContext> = async (app, { context }) => {
  for (const prefix of ['', '/v1'] as const) {
    const config = { auth: 'normal' } as const
    const suffix = prefix === '' ? '' : 'V1'
    app.post(`${prefix}/tokenize`, {
      config,
      schema: {
        operationId: `tokenize${suffix}`,
        summary: 'Text to token ids',
        tags: ['text'],
        body: TokenizeBody,
        response: { 200: Tokens, ...refusals() }
      }
    }, async (request, reply) => await sendJson(reply, await encode(request.body, context)))
    app.post(`${prefix}/detokenize`, {
      config,
      schema: {
        operationId: `detokenize${suffix}`,
        summary: 'Token ids to text',
        tags: ['text'],
        body: DetokenizeBody,
        response: { 200: Texts, ...refusals() }
      }
    }, async (request, reply) => await sendJson(reply, await decode(request.body, context)))
  }
}

/** Ids and texts, as lists that are written when they are sent: megabytes of text have millions of tokens. */
async function encode (body: Static<typeof TokenizeBody>, context: GenerationContext): Promise<object> {
  refuseFields(TokenizeBody, body)
  const tokenizer = needTokenizer(context.tokenizer, 'prompt')
  const { prompt, messages } = body
  if ((prompt == null) === (messages == null)) throw invalid('prompt', 'exactly one of prompt and messages is needed')
  const texts = [prompt ?? []].flat()
  const all = prompt == null
    ? [(await readPrompt({ ...body, messages: messages! }, context)).ids]
    : await idsOfTexts(tokenizer, texts, body.add_special_tokens ?? true)
  const single = !Array.isArray(prompt)
  const each = (read: (ids: ArrayLike<number>) => unknown): unknown => single ? read(all[0]!) : all.map(read)
  return {
    tokens: each(ids => new LazyList(ids.length, i => ids[i])),
    count: each(ids => ids.length),
    max_model_len: context.engine.info.contextLength,
    ...body.return_token_strs === true
      ? { token_strs: each(ids => new LazyList(ids.length, i => tokenizer.idToText(ids[i]!))) }
      : {}
  }
}

async function decode (
  { tokens, skip_special_tokens: skip }: Static<typeof DetokenizeBody>,
  { engine, tokenizer: maybe }: GenerationContext
): Promise<Static<typeof Texts>> {
  const tokenizer = needTokenizer(maybe, 'tokens')
  const { vocabSize } = engine.info
  const decodeOne = async (ids: number[], param: string, skipSpecialTokens: boolean): Promise<string> => {
    const stray = ids.find(id => id < 0 || id >= vocabSize)
    if (stray !== undefined) throw invalid(param, `expected token ids from 0 to ${vocabSize - 1}, got ${stray}`)
    return await decodeInTurns(tokenizer, ids, skipSpecialTokens)
  }
  const decodeAll = async (skipSpecialTokens: boolean): Promise<string | string[]> => {
    if (!Array.isArray(tokens[0])) return await decodeOne(tokens as number[], 'tokens', skipSpecialTokens)
    const texts: string[] = []
    for (const [i, ids] of (tokens as number[][]).entries()) {
      texts.push(await decodeOne(ids, `tokens[${i}]`, skipSpecialTokens))
    }
    return texts
  }
  const [text, prompt] = [skip ?? true, skip ?? false]
  const first = await decodeAll(text)
  return { text: first, prompt: prompt === text ? first : await decodeAll(prompt) }
}

export default tokenize
