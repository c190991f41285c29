import { Ajv2020 } from 'ajv/dist/2020.js'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import { buildServer } from '../../src/app/server.ts'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// A model of random weights with a real byte-level vocabulary: whatever it prefers, its output follows the grammar.

const folder = mkdtempSync(join(tmpdir(), 'refit-structured-'))
const tokenizer = (await loadTokenizer(join(packageRoot, 'test/fixtures/text/qwen-like')))!
const vocabSize = Math.ceil(tokenizer.vocabSize / 32) * 32 + 7
writeModelFolder(folder, { ...tinyConfig('Qwen3ForCausalLM'), vocab_size: vocabSize }, { values: randomValues(3) })
const engine = await createEngine(folder, { tp: 2, threads: 1, maxTotalTokens: 4096, vocabulary: tokenizer.vocabulary })
const server = await buildServer({ engine, tokenizer, host: '127.0.0.1', port: 0 })
t.teardown(async () => {
  await server.close()
  await engine.close()
  rmSync(folder, { recursive: true, force: true })
})

async function post (path: string, body: object): Promise<any> {
  const reply = await fetch(server.listeningOrigin + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  return { status: reply.status, ...await reply.json() as object }
}

const SCHEMA = {
  type: 'object',
  properties: {
    name: { type: 'string', minLength: 1, maxLength: 6 },
    size: { type: 'integer', minimum: -20, maximum: 1000 },
    tags: { type: 'array', items: { enum: ['x', 'y', 'é'] }, maxItems: 3 },
    rest: { anyOf: [{ type: 'null' }, { type: 'object', properties: { ok: { type: 'boolean' } }, required: ['ok'] }] }
  },
  required: ['name', 'size', 'rest']
}

t.test('samples of a schema are valid, reproducible, and beside free samples that do not change', async t => {
  const valid = new Ajv2020().compile(SCHEMA)
  const free = { prompt: 'a b', max_tokens: 40, seed: 5, temperature: 1, logprobs: 0 }
  const alone = await post('/v1/completions', free)
  const constrained = {
    prompt: 'JSON:',
    n: 6,
    seed: 7,
    max_tokens: 200,
    temperature: 1.5,
    top_p: 0.95,
    logprobs: 3,
    response_format: { type: 'json_schema', json_schema: { name: 'thing', schema: SCHEMA } }
  }
  const [first, beside] = await Promise.all([post('/v1/completions', constrained), post('/v1/completions', free)])
  t.equal(first.status, 200, JSON.stringify(first).slice(0, 300))
  t.equal(first.choices.length, 6)
  for (const { text, finish_reason: reason, logprobs } of first.choices) {
    t.equal(reason, 'stop', text)
    t.ok(valid(JSON.parse(text)), text)
    // Logprobs are of the masked distribution: they are finite, and certain where one token is allowed.
    t.ok(logprobs.token_logprobs.every((value: number) => value <= 0 && value > -100))
  }
  t.ok(new Set(first.choices.map(({ text }: { text: string }) => text)).size > 1)
  t.same(beside.choices, alone.choices)
  const again = await post('/v1/completions', constrained)
  t.same(again.choices, first.choices)
})

t.test('a pattern, a choice, a grammar and a tag hold on every route, streamed too', async t => {
  const body = { prompt: 'x', max_tokens: 120, temperature: 1, seed: 1 }
  t.match(
    (await post('/v1/completions', { ...body, regex: '[a-f]{3}-\\d{2,4}' })).choices[0].text,
    /^[a-f]{3}-\d{2,4}$/
  )
  t.match(
    (await post('/inference/v1/generate', {
      token_ids: [5],
      output_mode: 'text',
      sampling_params: { max_tokens: 20, structured_outputs: { choice: ['yes', 'no'] } }
    }))
      .choices[0]
      .message
      ?.content ?? 'no',
    /^(yes|no)$/
  )
  const generated = await post('/generate', {
    text: 'x',
    sampling_params: { max_new_tokens: 60, ebnf: 'root ::= "<" [a-z]{2,5} (" " [0-9]{1,2}){0,3} ">"' }
  })
  t.match(generated.text, /^<[a-z]{2,5}( \d{1,2}){0,3}>$/)
  t.equal(generated.meta_info.finish_reason.type, 'stop')
  const tag = {
    type: 'structural_tag',
    format: {
      type: 'tag',
      begin: '<call>',
      content: {
        type: 'json_schema',
        json_schema: { type: 'object', properties: { a: { type: 'boolean' } }, required: ['a'] }
      },
      end: '</call>'
    }
  }
  const { text } = (await post('/v1/completions', { ...body, response_format: tag })).choices[0]
  t.type(JSON.parse(/^<call>(.*)<\/call>$/s.exec(text)![1]!).a, 'boolean')
})

t.test('allowed tokens and bad words hold', async t => {
  const ids = tokenizer.encode('abc', { addSpecialTokens: false })
  const body = { prompt: 'x', max_tokens: 30, temperature: 1, seed: 3, return_token_ids: true, ignore_eos: true }
  const allowed = await post('/v1/completions', { ...body, allowed_token_ids: [...ids, 7] })
  t.ok(allowed.choices[0].token_ids.every((id: number) => [...ids, 7].includes(id)))
  const plain = await post('/v1/completions', { ...body, temperature: 0 })
  const [a, b] = plain.choices[0].token_ids as number[]
  const word = tokenizer.decode([a!])
  if (tokenizer.encode(word, { addSpecialTokens: false }).join() === String(a)) {
    const without = await post('/v1/completions', { ...body, temperature: 0, bad_words: [word] })
    t.notOk(without.choices[0].token_ids.includes(a), `${word} (${a}, ${b}) is banned`)
  }
})

t.test('a bad grammar is refused with what is wrong', async t => {
  const refused = await post('/v1/completions', { prompt: 'x', structured_outputs: { regex: '(a' } })
  t.match(refused, { status: 400, error: { code: 'INVALID_REQUEST', message: /regex: .*Unterminated group/ } })
})
