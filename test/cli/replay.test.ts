import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { replay } from '../../src/cli/replay.ts'
import { sealed } from '../../src/http/samples/receipt.ts'
import type { Receipt } from '../../src/http/samples/receipt.ts'
import { packageRoot } from '../../src/root.ts'
import { runCommand } from '../helpers/cli/run-command.ts'
import type { CommandResult } from '../helpers/cli/run-command.ts'
import { MODEL, serveModel } from '../helpers/conformance/served-model.ts'
import { call } from '../helpers/route-app.ts'

const TRAINED = join(packageRoot, 'models/adder')

/** Runs the command. Returns what it wrote and its exit code. */
async function run (
  t: Test,
  receipt: unknown,
  ...args: string[]
): Promise<CommandResult> {
  const path = join(t.testdir(), 'receipt.json')
  writeFileSync(path, typeof receipt === 'string' ? receipt : JSON.stringify(receipt))
  return await runCommand(t, replay, path, ...args)
}

t.test('wrong arguments are refused with what was expected', async t => {
  const refused = async (message: RegExp, ...args: string[]): Promise<unknown> =>
    await t.rejects(replay(args), { code: 'CONFIG', message })
  await refused(/expected one receipt, got 0/)
  await refused(/needs either --model or --url/, 'x')
  await refused(/needs either --model or --url/, 'x', '--model', 'y', '--url', 'http://a')
  await refused(/--tolerance: expected a number from 0/, 'x', '--model', 'y', '--tolerance', 'some')
  await refused(/x\.json cannot be read as JSON/, '/nonexistent/x.json', '--model', MODEL)
})

t.test('a sample of a busy server is repeated bit for bit, by its server and by the model alone', async t => {
  const { url } = await serveModel(t, { keepSamples: 'all' })
  // They run side by side: the batch of the repetition is another one.
  const text = ['123+456=', '99+1=', '777+8=', '5+5=']
  const sampling = { max_new_tokens: 12, temperature: 1, n: 4, ignore_eos: true, top_p: 0.95, frequency_penalty: 0.2 }
  const { json } = await call(`${url}/generate`, { text, rid: text, sampling_params: sampling, return_logprob: true })
  t.equal(json.length, 16)
  for (const id of ['123+456=_2', '5+5=_0']) {
    const { json: receipt } = await call(`${url}/samples/${encodeURIComponent(id)}`)
    for (const where of [['--url', url], ['--model', MODEL]]) {
      const { out, code } = await run(t, receipt, ...where)
      t.match(out, /^weights: the same .*\ntokens: 12 of 12 equal\nlogprobs: 12 of 12 equal, bit for bit\n$/)
      t.equal(code, 0)
    }
    const other = await run(t, receipt, '--model', TRAINED)
    t.match(other.out, /^weights: OTHERS: the sample was made by/)
    t.equal(other.code, 1)
  }
})

t.test('ranks that gather activations repeat the bits of one rank, and partial sums are not promised to', async t => {
  const [one, two] = [await serveModel(t), await serveModel(t, { tp: 2 })]
  for (const deterministic of [true, false]) {
    const { url } = await serveModel(t, { keepSamples: 'all', tp: 2, deterministic })
    await call(`${url}/generate`, {
      text: '123+456=',
      rid: 'one',
      sampling_params: { temperature: 1, max_new_tokens: 12, ignore_eos: true },
      return_logprob: true,
      receipt: true
    })
    const { json: receipt } = await call(`${url}/samples/one`)
    t.match(receipt.device, { ranks: 2, exact: true, any_ranks: deterministic })
    const plain = await run(t, receipt, '--url', two.url)
    t.match(plain.out, deterministic ? /the devices differ/ : /logprobs: 12 of 12 equal, bit for bit/)
    const elsewhere = await run(t, receipt, '--url', one.url)
    t.match(elsewhere.out, deterministic ? /logprobs: 12 of 12 equal, bit for bit/ : /the devices differ/)
    const { out, code } = await run(t, receipt, '--model', MODEL)
    t.match(out, /logprobs: 12 of 12 equal, bit for bit/)
    t.equal(code, 0)
  }
})

t.test('a replay after an update reports other weights and the first other token', async t => {
  const { url } = await serveModel(t, { modelRoots: [join(packageRoot, 'models')] })
  await call(`${url}/generate`, {
    text: '123+456=',
    rid: 'one',
    sampling_params: { temperature: 0, max_new_tokens: 8 },
    return_logprob: true,
    receipt: true
  })
  const { json: receipt } = await call(`${url}/samples/one`)
  const update = await call(`${url}/update_weights_from_disk`, { model_path: TRAINED, weight_version: 'trained' })
  t.equal(update.status, 200, update.text)
  const { out, code } = await run(t, receipt, '--url', url)
  t.match(out, /weights: OTHERS: .* version "trained"\ntokens: DIFFERENT from token 0 on: 54 \(logprob .*\); here 53/)
  t.equal(code, 1)
  // The sample of the base model answers 689, the trained one 579.
  t.match((await call(`${url}/samples/one`)).json.weights, { state: 'gone', digest: receipt.weights.digest })
})

t.test('a spoiled receipt is found, sealed again or not', async t => {
  const { url } = await serveModel(t)
  await call(`${url}/generate`, {
    text: '123+456=',
    rid: 'one',
    sampling_params: { max_new_tokens: 6 },
    return_logprob: true,
    receipt: true
  })
  const { json: receipt } = await call(`${url}/samples/one`) as { json: Receipt }
  const changed = (change: Partial<Receipt>): Receipt => ({ ...receipt, ...change })
  const ids = receipt.output_ids.with(1, 70)
  const at2 = receipt.logprobs!.with(2, receipt.logprobs![2]! - 1e-9)
  await t.rejects(run(t, changed({ output_ids: ids }), '--url', url), {
    code: 'CONFIG',
    message: /its seal does not fit/
  })
  await t.rejects(run(t, '{"receipt": 1}', '--url', url), { code: 'CONFIG', message: /is no receipt/ })
  for (
    const [spoiled, message] of [
      [{ output_ids: ids }, /tokens: DIFFERENT from token 1 on: 70/],
      [{ logprobs: at2 }, /logprobs: DIFFERENT at token 2: /],
      [{ output_ids: receipt.output_ids.slice(0, -1) }, /here \d+/],
      [{ weights: { ...receipt.weights, digest: 'f'.repeat(64) } }, /weights: OTHERS/],
      [{ sampling_params: { ...receipt.sampling_params, temperature: 0.1 } }, /DIFFERENT/]
    ] as const
  ) {
    const { out, code } = await run(t, sealed(changed(spoiled as Partial<Receipt>)), '--url', url)
    t.match(out, message)
    t.equal(code, 1)
  }
  for (
    const [unusable, message] of [
      [{ unrepeatable: ['bad_words'] }, /has no fields for bad_words/],
      [{ weight_versions: [...receipt.weight_versions, ...receipt.weight_versions] }, /2 weight versions made/]
    ] as const
  ) {
    const { err, code } = await run(t, sealed(changed(unusable as Partial<Receipt>)), '--url', url)
    t.match(err, message)
    t.equal(code, 2)
  }
  const unreachable = await run(t, receipt, '--url', 'http://127.0.0.1:9')
  t.match(unreachable.err, /ECONNREFUSED/)
  t.equal(unreachable.code, 2)
})
