import t from 'tap'
import type { ReplyContext } from '../../../src/text/reasoning/reasoning-format.ts'
import { REASONING_FORMATS, reasoningFormat } from '../../../src/text/reasoning/reasoning-formats.ts'
import { cuts } from '../tools/calls.ts'

type Case = [name: string, prompt: string | null, text: string, reasoning: string, content: string]

const CASES: Case[] = [
  ['qwen3', 'Q', '<think>\na <b> é🏔</think>\n\nyes', '\na <b> é🏔', '\n\nyes'],
  ['qwen3', 'Q', '\n<think>x</think>y <think>z</think>', 'x', 'y <think>z</think>'],
  ['qwen3', 'Q', 'no <think>tag</think>', '', 'no <think>tag</think>'],
  ['qwen3', 'Q', ' <thi', '', ' <thi'],
  ['qwen3', 'Q<think>\n', 'a</think>b', 'a', 'b'],
  ['qwen3', 'Q<think>\n', '<think>a</think>b', 'a', 'b'],
  ['qwen3', 'Q<think>\n\n</think>\n\n', 'a', '', 'a'],
  ['qwen3', 'Q<think>\n', 'never closed </thin', 'never closed </thin', ''],
  ['qwen3', 'Q', '<think>call\n<tool_call>{}</tool_call>', 'call\n', '<tool_call>{}</tool_call>'],
  ['qwen3', 'Q', '<think>a <tool_call> is a tag</think>b', 'a <tool_call> is a tag', 'b'],
  ['qwen3', 'Q', '<think><tool_call>x', '', '<tool_call>x'],
  ['qwen3', '<think>', ' ', ' ', ''],
  ['qwen3-thinking', 'Q', 'a</think>b', 'a', 'b'],
  ['deepseek-r1', 'Q', 'a\n<tool_call></think>b', 'a\n<tool_call>', 'b'],
  ['deepseek_r1', 'Q', '<think>a', 'a', ''],
  ['deepseek-r1', 'Q<think></think>', 'b', '', 'b'],
  ['deepseek-v3', 'Q', 'a</think>b', '', 'a</think>b'],
  ['deepseek_v4', 'Q<think>', 'a</think>b', 'a', 'b'],
  ['glm45', 'Q', '<think>a\n<tool_call>f</tool_call>', 'a\n', '<tool_call>f</tool_call>'],
  ['kimi', 'Q', '◁think▷a◁/think▷b', 'a', 'b'],
  [
    'kimi_k2',
    'Q<think>',
    'a\n<|tool_calls_section_begin|>f',
    'a\n',
    '<|tool_calls_section_begin|>f'
  ],
  ['mistral', 'Q', '[THINK]a[/THINK]b', 'a', 'b'],
  [
    'gpt-oss',
    null,
    '<|channel|>analysis<|message|>a é<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>',
    'a é',
    'b'
  ],
  ['gpt-oss', null, '<|channel|>analysis<|message|>cut <|en', 'cut <|en', ''],
  ['gpt-oss', null, 'plain', '', 'plain'],
  ['gpt-oss', null, '<|channel|>fin', '', '<|channel|>fin'],
  [
    'openai_gptoss',
    null,
    '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>So:<|end|>' +
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>',
    'a',
    'So:<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>'
  ]
]

function parse (name: string, context: ReplyContext | null, pieces: readonly string[]): [string, string] {
  const parser = reasoningFormat(name).parser(context)
  const parts = [...pieces.flatMap(piece => parser.push(piece)), ...parser.finish()]
  const of = (kind: string): string => parts.filter(part => part.kind === kind).map(part => part.text).join('')
  return [of('reasoning'), of('content')]
}

t.test('reasoning and content are told apart, wherever a stream is cut', async t => {
  for (const [name, prompt, text, reasoning, content] of CASES) {
    const context = prompt === null ? null : { prompt, continued: null }
    t.same(parse(name, context, [text]), [reasoning, content], `${name}: ${prompt} ${text}`)
    const other = cuts(text).find(pieces => parse(name, context, pieces).join('|') !== `${reasoning}|${content}`)
    t.equal(other, undefined, `${name}: ${text}`)
  }
})

t.test('a continued message decides whether its reasoning goes on', async t => {
  const context = (continued: string): ReplyContext => ({ prompt: `Q<think>${continued}`, continued })
  t.same(parse('qwen3', context('<think>so'), ['a</think>b']), ['a', 'b'])
  t.same(parse('deepseek-r1', context('<think>so</think>And'), ['a']), ['', 'a'])
  t.same(parse('deepseek-r1', context('And'), ['a']), ['', 'a'])
})

t.test('reasoning arrives as soon as it can be no tag', async t => {
  const parser = reasoningFormat('qwen3').parser({ prompt: '<think>', continued: null })
  t.same(parser.push('x'), [{ kind: 'reasoning', text: 'x' }])
  t.same(parser.push('y </th'), [{ kind: 'reasoning', text: 'y ' }])
  t.same(parser.push('ink>z'), [{ kind: 'content', text: 'z' }])
})

t.test('every format is tested, and an unknown name is refused', async t => {
  const tested = new Set(CASES.map(([name]) => reasoningFormat(name)))
  t.same([...REASONING_FORMATS].filter(([, format]) => !tested.has(format)), [])
  t.throws(() => reasoningFormat('r2'), {
    code: 'CONFIG',
    message: /^--reasoning-parser: expected qwen3, .*; got "r2"$/
  })
})
