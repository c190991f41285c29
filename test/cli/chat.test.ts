import { PassThrough } from 'node:stream'
import { text } from 'node:stream/consumers'
import t from 'tap'
import type { Test } from 'tap'
import { ServerConnection } from '../../src/client/server-connection.ts'
import { ChatSession } from '../../src/chat/chat-session.ts'
import { ChatTerminal } from '../../src/chat/terminal.ts'
import { chat } from '../../src/cli/chat.ts'
import { serveModel } from '../helpers/conformance/served-model.ts'
import { runCommand } from '../helpers/cli/run-command.ts'
import { END, event, json, scriptedServer } from '../helpers/load/scripted-server.ts'
import type { Asked } from '../helpers/load/scripted-server.ts'

/** Runs a chat whose user types these lines, and returns what the terminal shows. */
async function say (url: string, lines: string[], ...args: string[]): Promise<string> {
  const [input, output] = [new PassThrough(), new PassThrough()]
  const shown = text(output)
  input.end(lines.map(line => line + '\n').join(''))
  await chat([url, ...args], { input, output })
  output.end()
  return await shown
}

const delta = (content: string, finish: string | null = null): string =>
  event({ choices: [{ index: 0, delta: { content }, finish_reason: finish }] })

/** A server that echoes the number of messages and the last one. */
async function echo (t: Test, asked: Asked[] = []): Promise<string> {
  return await scriptedServer(t, request => {
    const { path, body, reply } = request
    if (path === '/v1/models') return json(reply, 200, { data: [{ id: 'small' }, { id: 'large' }] })
    asked.push(request)
    const { messages } = body
    if (messages.at(-1).content === 'fail') {
      return json(reply, 400, { error: { message: 'this one is refused', code: 'INVALID_REQUEST' } })
    }
    reply.writeHead(200, { 'x-refit-weight-version': 'step%2D1' })
    reply.write(event({ choices: [{ index: 0, delta: { reasoning_content: 'let me think' }, finish_reason: null }] }))
    reply.write(delta(`${messages.length}: `))
    reply.write(delta(messages.at(-1).content, 'stop'))
    reply.write(event({ choices: [], usage: { completion_tokens: 5 }, metadata: { weight_version: 'step-2' } }))
    reply.end(END)
  })
}

t.test('wrong arguments are refused', async t => {
  await t.rejects(chat([]), { code: 'CONFIG', message: /chat: needs the URL/ })
  await t.rejects(chat(['http://a', '--max-tokens', '0']), {
    code: 'CONFIG',
    message: /--max-tokens: expected an integer/
  })
})

t.test('a server that requires another key is exit code 2', async t => {
  const url = await scriptedServer(t, ({ reply }) => json(reply, 401, {}))
  const err = `refit: GET ${url}/v1/models answered 401: give the key by --api-key or REFIT_API_KEY\n`
  t.match(await runCommand(t, chat, url), { code: 2, err })
})

t.test('a server that cannot be reached is exit code 2', async t => {
  t.match(await runCommand(t, chat, 'http://127.0.0.1:9'), { code: 2, err: /cannot be reached/ })
})

t.test('a conversation grows, and shows the version of the weights of each answer', async t => {
  const asked: Asked[] = []
  const shown = await say(await echo(t, asked), ['one', '', 'two'], '--temperature', '0.5', '--max-tokens', '9')
  t.match(shown, /^let me think\n\n1: one\n\[weights step-2, 5 tokens, \d+\.\d s\]\nlet me think\n\n3: two\n/)
  t.match(asked[1]!.body, {
    model: 'small',
    stream: true,
    temperature: 0.5,
    max_tokens: 9,
    messages: [
      { role: 'user', content: 'one' },
      { role: 'assistant', content: '1: one' },
      { role: 'user', content: 'two' }
    ]
  })
})

t.test('/system, /reset, /model and lines that go on', async t => {
  const asked: Asked[] = []
  const lines = [
    'one',
    '/reset',
    'a\\',
    'b',
    '/system be brief',
    'two',
    '/model',
    '/model 2',
    'three',
    '/model x',
    '/wrong',
    '/quit',
    'no'
  ]
  const shown = await say(await echo(t, asked), lines)
  t.strictSame(asked.map(({ body }) => [body.model, body.messages.map(({ content }: any) => content)]), [
    ['small', ['one']],
    ['small', ['a\nb']],
    ['small', ['be brief', 'two']],
    ['large', ['be brief', 'two', '2: two', 'three']]
  ])
  t.match(shown, /^\* 1 small\n {2}2 large\n\[model large\]$/m)
  t.match(shown, /^\[there is no model x; \/model lists them\]$/m)
  t.match(shown, /^\[there is no command \/wrong\]\n\/reset /m)
})

t.test('a refused message is shown and taken back, so that the chat goes on', async t => {
  const asked: Asked[] = []
  const shown = await say(await echo(t, asked), ['fail', 'one'])
  t.match(shown, /^\[error: this one is refused\]\n/)
  t.equal(asked[1]!.body.messages.length, 1)
})

t.test('what a model sends cannot control the terminal', async t => {
  const url = await scriptedServer(t, ({ path, reply }) => {
    if (path === '/v1/models') return json(reply, 200, { data: [{ id: 'm' }] })
    reply.writeHead(200)
    reply.end(delta('a\x1b[2Jb\x07\x1b]0;title\x07c\td\ne') + END)
  })
  t.match(await say(url, ['hi']), /^a\[2Jb\]0;titlec\td\ne\n\[/)
})

t.test('Ctrl-C stops an answer and keeps what came, and a second one ends the chat', async t => {
  const [input, output] = [new PassThrough(), new PassThrough()]
  const asked: Asked[] = []
  const closed: boolean[] = []
  const url = await scriptedServer(t, request => {
    asked.push(request)
    const { reply } = request
    reply.writeHead(200)
    reply.on('close', () => closed.push(reply.writableFinished))
    reply.write(delta('the beginning'))
    if (asked.length > 1) reply.end(END)
  })
  let seen = ''
  let isStopped = false
  output.on('data', part => {
    seen += String(part)
    if (!isStopped && seen.includes('the beginning')) {
      isStopped = true
      terminal.interrupt()
    } else if (seen.includes('stopped') && asked.length === 1) input.write('and then?\n')
    else if (/beginning\n.*beginning\n/s.test(seen)) terminal.interrupt()
  })
  const connection = new ServerConnection(url, {})
  t.teardown(async () => await connection.close())
  const terminal = new ChatTerminal(new ChatSession(connection, { model: 'm', temperature: null, maxTokens: null }), {
    input,
    output
  })
  const end = terminal.run()
  input.write('begin\n')
  await end
  t.match(seen, /^the beginning\n\[\d+\.\d s, stopped\]\nthe beginning\n/)
  t.strictSame(asked[1]!.body.messages.map(({ content }: any) => content), ['begin', 'the beginning', 'and then?'])
  t.strictSame(closed, [false, true])
})

t.test('against a real server: the answer, and the label of its weights', async t => {
  const { url } = await serveModel(t)
  const before = await say(url, ['12+34='], '--temperature', '0', '--max-tokens', '4')
  t.match(before, /\[weights default, \d tokens, /)
  await fetch(`${url}/update_weight_version`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ new_version: 'step 7/é' })
  })
  t.match(await say(url, ['12+34='], '--max-tokens', '4'), /\[weights step 7\/é, \d tokens, /)
})
