import type { Random } from '../lib/random.ts'
import type { Family, World } from '../lib/world.ts'

const ALPHABET = [
  'a',
  'b',
  '(',
  ')',
  '[',
  ']',
  '*',
  '+',
  '?',
  '|',
  '{1,9}',
  '{0,200}',
  '.',
  '\\d',
  '\\w',
  '^',
  '$',
  '\\',
  '(?=',
  '(?:',
  '\\1',
  'é',
  '[^a]',
  '\\p{L}',
  '\\u{10ffff}',
  ','
]
const TYPES = ['object', 'array', 'string', 'number', 'integer', 'boolean', 'null']

/** Grammars of requests that are broken, or that grow when they are compiled. */
export const grammars: Family = {
  name: 'grammars',
  attack: async (world, random) => {
    for (const [name, params] of bombs()) await ask(world, name, params)
    for (let i = 0; i < 25; i++) {
      await ask(world, 'a regex', {
        regex: Array.from({ length: 1 + random.below(20) }, () => random.pick(ALPHABET)).join('')
      })
      await ask(world, 'a schema', { json_schema: JSON.stringify(schema(random, 4)) })
      const ebnf = `root ::= ${
        Array
          .from({ length: 1 + random.below(8) }, () =>
            random.pick(['"a"', 'x', '|', '(', ')', '*', '+', '[a-z]', '{2}', 'root', '"', '::=']))
          .join(' ')
      }\nx ::= root | "b"`
      await ask(world, 'an EBNF', { ebnf })
    }
  }
}

async function ask (world: World, name: string, params: object): Promise<void> {
  const body = { text: '1+1=', sampling_params: { max_new_tokens: 3, temperature: 0, ...params } }
  const { status, text, ms } = await world.open.call('/generate', { body, timeoutMs: 60_000 })
  const isGood = status === 200 || status === 400 || status === 503
  world.check(
    'a grammar is followed or refused',
    isGood,
    () => `${name} ${JSON.stringify(params).slice(0, 700)}: ${status} after ${ms.toFixed(0)} ms ${text.slice(0, 300)}`
  )
}

function schema (random: Random, depth: number): object {
  if (depth === 0) return {}
  const own = (): object => schema(random, depth - 1)
  return random.pick<() => object>([
    () => ({ type: random.pick(TYPES) }),
    () => ({ type: random.some(TYPES, 2) }),
    () => ({ type: 'object', properties: { a: own(), b: own() }, required: ['a', 'c'], additionalProperties: own() }),
    () => ({ type: 'array', items: own(), minItems: random.below(5000), maxItems: random.below(3) }),
    () => ({ anyOf: [own(), own()] }),
    () => ({ allOf: [own(), own()] }),
    () => ({ not: own() }),
    () => ({ $ref: '#' }),
    () => ({ $ref: '#/$defs/x', $defs: { x: { $ref: '#/$defs/x' } } }),
    () => ({ $ref: 'http://evil.example/schema.json' }),
    () => ({ enum: [1, 'a', null, { a: [1] }, 1e308] }),
    () => ({ const: random.pick([null, 'a', {}, []]) }),
    () => ({ type: 'string', pattern: '^(a+)+$', minLength: random.below(1000) }),
    () => ({ type: 'string', format: random.pick(['date-time', 'uuid', 'hurt']) }),
    () => ({ type: 'integer', minimum: -(10 ** random.below(20)), maximum: 10 ** random.below(20) }),
    () => ({ type: 'number', multipleOf: 1e-9 })
  ])()
}

function bombs (): [name: string, params: object][] {
  let nested: object = { type: 'string' }
  for (let depth = 0; depth < 300; depth++) nested = { type: 'object', properties: { a: nested }, required: ['a'] }
  const wide = { type: 'object', properties: Object.fromEntries(Array.from({ length: 3000 }, (_, i) => [`p${i}`, {}])) }
  const doubling = Object.fromEntries(Array.from({ length: 40 }, (_, i) => [`d${i}`, {
    type: 'array',
    prefixItems: [{ $ref: `#/$defs/d${i + 1}` }, { $ref: `#/$defs/d${i + 1}` }]
  }]))
  return [
    ['counts in counts', { regex: '((((a{1,99}){1,99}){1,99}){1,99}){1,99}' }],
    ['a long count', { regex: 'a{1000000}' }],
    ['many ways', { regex: '(a|b|ab)*(a|b|ab)*c{0,200}(.*a.{12})' }],
    ['the last but n', { regex: '(0|1)*1(0|1){14}' }],
    ['10,000 brackets', { regex: `${'('.repeat(10_000)}a${')'.repeat(10_000)}` }],
    ['a long class', { regex: `[${'a-z'.repeat(50_000)}]` }],
    ['a long text', { regex: 'a'.repeat(500_000) }],
    ['300 levels', { json_schema: JSON.stringify(nested) }],
    ['3000 properties', { json_schema: JSON.stringify(wide) }],
    ['references that double', { json_schema: JSON.stringify({ $ref: '#/$defs/d0', $defs: doubling }) }],
    ['20,000 values', { json_schema: JSON.stringify({ enum: Array.from({ length: 20_000 }, (_, i) => `v${i}`) }) }],
    ['long texts', { json_schema: JSON.stringify({ type: 'string', minLength: 100_000, maxLength: 1_000_000 }) }],
    ['rules in themselves', { ebnf: 'root ::= root root | "a"' }],
    ['left recursion', { ebnf: 'root ::= x "a"\nx ::= root "b" | ""' }],
    ['5,000 rules', {
      ebnf: Array.from({ length: 5000 }, (_, i) => `r${i} ::= r${i + 1} r${i + 1} | "a"`).join('\n') +
        '\nr5000 ::= "b"\nroot ::= r0'
    }],
    ['no root', { ebnf: 'x ::= "a"' }],
    ['an open text', { ebnf: 'root ::= "a' }],
    ['two grammars', { regex: 'a', json_schema: '{}' }],
    ['a tag without end', { structural_tag: '{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":[""]}' }]
  ]
}
