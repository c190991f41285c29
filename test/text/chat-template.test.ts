import { mkdir, mkdtemp, readFile, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import type { ChatMessage, Tokenizer } from '../../src/text/tokenizer.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'

const FOLDER = join(packageRoot, 'test/fixtures/text/qwen-like')
const USER = [{ role: 'user', content: 'Hi' }]

/**
 * A tokenizer with other templates: `config` is the chat_template of tokenizer_config.json, `files` are more files of
 * the folder.
 */
async function withTemplates (config: unknown, files: Record<string, string> = {}): Promise<Tokenizer> {
  const dir = await mkdtemp(join(tmpdir(), 'refit-chat-'))
  await mkdir(join(dir, 'chat_templates'))
  await writeFile(join(dir, 'tokenizer.json'), await readFile(join(FOLDER, 'tokenizer.json')))
  await writeFile(
    join(dir, 'tokenizer_config.json'),
    JSON.stringify({ bos_token: '<|endoftext|>', eos_token: { content: '<|end|>' }, chat_template: config })
  )
  for (const [name, text] of Object.entries(files)) await writeFile(join(dir, name), text)
  return (await loadTokenizer(dir))!
}

t.test('a template renders the same text as in transformers', async t => {
  const tokenizer = (await loadTokenizer(FOLDER))!
  const { chats } = JSON.parse(await readFile(join(FOLDER, 'golden.json'), 'utf8'))
  t.ok(chats.length >= 7)
  for (const chat of chats) {
    const text = tokenizer.applyChatTemplate(chat.messages, {
      addGenerationPrompt: chat.add_generation_prompt,
      continueFinalMessage: chat.continue_final_message,
      tools: chat.tools,
      kwargs: chat.enable_thinking === undefined ? {} : { enable_thinking: chat.enable_thinking }
    })
    t.equal(text, chat.text)
  }
})

t.test('the generation prompt is added unless it is refused', async t => {
  const tokenizer = await withTemplates('{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}')
  t.equal(tokenizer.applyChatTemplate(USER), 'Hi>')
  t.equal(tokenizer.applyChatTemplate(USER, { addGenerationPrompt: false }), 'Hi')
})

t.test('templates come from the configuration by name, from chat_template.jinja and from chat_templates', async t => {
  const named = await withTemplates([{ name: 'default', template: 'D' }, { name: 'tool_use', template: 'T' }, {
    name: 'rag',
    template: 'R'
  }])
  t.equal(named.applyChatTemplate(USER), 'D')
  t.equal(named.applyChatTemplate(USER, { tools: [] }), 'D')
  t.equal(named.applyChatTemplate(USER, { tools: [{ type: 'function' }] }), 'T')
  t.equal(named.applyChatTemplate(USER, { name: 'rag', tools: [{ type: 'function' }] }), 'R')
  t.throws(() => named.applyChatTemplate(USER, { name: 'absent' }), {
    code: 'INVALID_REQUEST',
    message: /"absent".*"default", "tool_use", "rag"/
  })
  const file = await withTemplates('old', {
    'chat_template.jinja': 'new',
    'chat_templates/tool_use.jinja': 'tools',
    'chat_templates/readme.txt': 'x'
  })
  t.equal(file.applyChatTemplate(USER), 'new')
  t.equal(file.applyChatTemplate(USER, { tools: [{}] }), 'tools')
  const none = await withTemplates(undefined)
  t.notOk(none.hasChatTemplate)
  t.throws(() => none.applyChatTemplate(USER), {
    code: 'INVALID_REQUEST',
    statusCode: 400,
    message: /no chat template/
  })
})

t.test("templates can use the model's special tokens by name, and others are undefined", async t => {
  const tokenizer = await withTemplates(
    '{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ tools is none }}'
  )
  t.equal(tokenizer.applyChatTemplate(USER), '<|endoftext|>|<|end|>|false|true')
})

t.test('a template can refuse: the message is passed on as a 400', async t => {
  const tokenizer = await withTemplates("{{ raise_exception('only one turn') if messages | length > 1 else 'ok' }}")
  t.equal(tokenizer.applyChatTemplate(USER), 'ok')
  t.throws(() => tokenizer.applyChatTemplate([...USER, ...USER]), {
    code: 'INVALID_REQUEST',
    statusCode: 400,
    param: 'messages',
    message: "the model's chat template does not take these messages: only one turn"
  })
})

t.test('a template that fails or cannot be parsed gives a 400, and the tokenizer still works', async t => {
  const failing = await withTemplates('{{ messages[0].content.absent.more() }}')
  t.throws(() => failing.applyChatTemplate(USER), { code: 'INVALID_REQUEST', message: /does not take these messages/ })
  const broken = await withTemplates('{% if %}')
  t.throws(() => broken.applyChatTemplate(USER), { code: 'UNSUPPORTED', message: /cannot be parsed/ })
  t.equal(broken.decode(broken.encode('still here')), 'still here')
})

t.test('strftime_now gives the date', async t => {
  const tokenizer = await withTemplates("{{ strftime_now('%Y-%m-%d') }}")
  t.match(tokenizer.applyChatTemplate(USER), /^\d{4}-\d\d-\d\d$/)
})

t.test('kwargs become variables, but cannot replace the messages', async t => {
  const tokenizer = await withTemplates('{{ mood }}{{ messages | length }}')
  t.equal(tokenizer.applyChatTemplate(USER, { kwargs: { mood: 'calm' } }), 'calm1')
  for (const key of ['messages', 'raise_exception', 'add_generation_prompt']) {
    t.throws(() => tokenizer.applyChatTemplate(USER, { kwargs: { [key]: [] } }), {
      code: 'INVALID_REQUEST',
      param: 'chat_template_kwargs',
      message: key
    })
  }
})

t.test('text parts become one string, unless the template loops over parts', async t => {
  const parts = [{ role: 'user', content: [{ type: 'text', text: 'a' }, { type: 'text', text: 'b' }] }]
  const plain = await withTemplates('{% for message in messages %}{{ message.content }}{% endfor %}')
  t.equal(plain.applyChatTemplate(parts), 'a\nb')
  const walking = await withTemplates(
    "{% for message in messages %}{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
  )
  t.equal(walking.applyChatTemplate(parts), '[a][b]')
  t.equal(plain.applyChatTemplate([{ role: 'assistant', content: null }, { role: 'user' }]), '')
  t.throws(() => plain.applyChatTemplate([{ role: 'user', content: [{ type: 'image_url' }] }]), {
    code: 'UNSUPPORTED',
    param: 'messages[0].content',
    message: /image_url/
  })
})

t.test('arguments of tool calls are objects, and text that is no JSON stays a string', async t => {
  const tokenizer = await withTemplates(
    '{% for call in messages[0].tool_calls %}{% if call.function.arguments is mapping %}' +
      '{{ call.function.arguments.a }}{% else %}{{ call.function.arguments }}{% endif %};{% endfor %}'
  )
  const call = (text: string) => ({ type: 'function', function: { name: 'f', arguments: text } })
  const messages: ChatMessage[] = [{
    role: 'assistant',
    content: null,
    tool_calls: [call('{"a": 5}'), call('{"a":'), call('7')]
  }]
  t.equal(tokenizer.applyChatTemplate(messages), '5;{"a":;7;')
  t.equal(
    (messages[0]!['tool_calls'] as { function: { arguments: string } }[])[0]!.function.arguments,
    '{"a": 5}',
    "the caller's messages are unchanged"
  )
})

t.test('the last message can be left open for continuation', async t => {
  const turns = '{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}' +
    '{% if add_generation_prompt %}<assistant>{% endif %}'
  const messages = [...USER, { role: 'assistant', content: 'So, ' }]
  const kept = await withTemplates(turns)
  t.equal(kept.applyChatTemplate(messages, { continueFinalMessage: true }), '<user>Hi</><assistant>So, ')
  const trimming = await withTemplates(turns.replace('message.content', 'message.content | trim'))
  t.equal(trimming.applyChatTemplate(messages, { continueFinalMessage: true }), '<user>Hi</><assistant>So,')
  const walking = await withTemplates(
    '{% for message in messages %}{% for part in message.content %}{{ part.text }}/{% endfor %}{% endfor %}'
  )
  const parts = [{ role: 'assistant', content: [{ type: 'text', text: 'one' }, { type: 'text', text: 'two' }] }]
  t.equal(walking.applyChatTemplate(parts, { continueFinalMessage: true }), 'one/two')
  const dropping = await withTemplates('{{ messages[0].content }}')
  t.throws(() => dropping.applyChatTemplate(messages, { continueFinalMessage: true }), {
    code: 'INVALID_REQUEST',
    message: /continue_final_message/
  })
})

t.test('invalid messages are refused with their index', async t => {
  const tokenizer = await withTemplates('x')
  const bad: [unknown, string][] = [
    [[], 'messages'],
    ['Hi', 'messages'],
    [[null], 'messages[0]'],
    [[...USER, 'x'], 'messages[1]'],
    [[{ content: 'x' }], 'messages[0]'],
    [[{ role: 'user', content: 5 }], 'messages[0].content'],
    [[{ role: 'user', content: [null] }], 'messages[0].content']
  ]
  for (const [messages, param] of bad) {
    t.throws(() => tokenizer.applyChatTemplate(messages as ChatMessage[]), { code: /./, statusCode: 400, param })
  }
})

t.test('a message with very deep nesting gets 400 and does not crash the server', async t => {
  const tokenizer = await withTemplates('{{ messages | tojson }}')
  let deep: unknown = 'x'
  for (let i = 0; i < 20_000; i++) deep = [deep]
  t.throws(() => tokenizer.applyChatTemplate([{ role: 'user', content: 'x', extra: deep }]), {
    code: 'INVALID_REQUEST'
  })
})
