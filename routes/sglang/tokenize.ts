import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { RouteContext, Routes } from '../../src/http/context.ts'
import { MAX_BATCH } from '../../src/http/limits.ts'
import { needTokenizer } from '../../src/http/prompts.ts'
import { invalid, refuseDeep } from '../../src/http/refuse.ts'
import { nullable, refusals, TokenIds } from '../../src/http/schemas.ts'

const TokenizeBody = Type.Object({
  model: nullable(Type.String(), 'Any name, because there is one model.'),
  prompt: nullable(
    Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: MAX_BATCH })]),
    'Text or a batch of texts.'
  ),
  messages: nullable(
    Type.Array(Type.Object({ role: Type.String() }, { additionalProperties: true }), { minItems: 1 }),
    'A conversation instead of a prompt.'
  ),
  add_special_tokens: nullable(
    Type.Boolean(),
    'Default true. For a conversation false, because its template adds special tokens.'
  ),
  add_generation_prompt: nullable(Type.Boolean(), 'For a conversation (default true).'),
  chat_template_kwargs: nullable(Type.Object({}, { additionalProperties: true }))
}, { title: 'TokenizeRequest' })

const Tokens = Type.Object({
  tokens: Type.Union([TokenIds, Type.Array(TokenIds)]),
  count: Type.Union([Type.Integer(), Type.Array(Type.Integer())]),
  max_model_len: Type.Integer()
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
const tokenize: Routes = async (app, { context }) => {
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
    }, async request => encode(request.body, context))
    app.post(`${prefix}/detokenize`, {
      config,
      schema: {
        operationId: `detokenize${suffix}`,
        summary: 'Token ids to text',
        tags: ['text'],
        body: DetokenizeBody,
        response: { 200: Texts, ...refusals() }
      }
    }, async request => decode(request.body, context))
  }
}

function encode (body: Static<typeof TokenizeBody>, { engine, tokenizer: maybe }: RouteContext): Static<typeof Tokens> {
  const tokenizer = needTokenizer(maybe, 'prompt')
  const { prompt, messages } = body
  if ((prompt == null) === (messages == null)) throw invalid('prompt', 'exactly one of prompt and messages is needed')
  refuseDeep(messages, 'messages')
  refuseDeep(body.chat_template_kwargs, 'chat_template_kwargs')
  const encodeOne = (text: string, addSpecialTokens: boolean): number[] => tokenizer.encode(text, { addSpecialTokens })
  const maxModelLength = engine.info.contextLength
  if (Array.isArray(prompt)) {
    const tokens = prompt.map(text => encodeOne(text, body.add_special_tokens ?? true))
    return { tokens, count: tokens.map(list => list.length), max_model_len: maxModelLength }
  }
  const tokens = prompt != null
    ? encodeOne(prompt, body.add_special_tokens ?? true)
    : encodeOne(
      tokenizer.applyChatTemplate(messages!, {
        addGenerationPrompt: body.add_generation_prompt ?? true,
        kwargs: { ...body.chat_template_kwargs }
      }),
      body.add_special_tokens ?? false
    )
  return { tokens, count: tokens.length, max_model_len: maxModelLength }
}

function decode (
  { tokens, skip_special_tokens: skip }: Static<typeof DetokenizeBody>,
  { engine, tokenizer: maybe }: RouteContext
): Static<typeof Texts> {
  const tokenizer = needTokenizer(maybe, 'tokens')
  const decodeOne = (ids: number[], param: string, skipSpecialTokens: boolean): string => {
    const stray = ids.find(id => id < 0 || id >= engine.info.vocabSize)
    if (stray !== undefined) {
      throw invalid(
        param,
        `expected token ids from 0 to ${
          engine
            .info
            .vocabSize - 1
        }, got ${stray}`
      )
    }
    return tokenizer.decode(ids, { skipSpecialTokens })
  }
  const decodeAll = (skipSpecialTokens: boolean): string | string[] =>
    Array.isArray(tokens[0])
      ? (tokens as number[][]).map((ids, i) => decodeOne(ids, `tokens[${i}]`, skipSpecialTokens))
      : decodeOne(tokens as number[], 'tokens', skipSpecialTokens)
  return { text: decodeAll(skip ?? true), prompt: decodeAll(skip ?? false) }
}

export default tokenize
