import t from 'tap'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import { serve } from '../helpers/transaction-server.ts'
import type { Server } from '../helpers/transaction-server.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const BODY = {
  text: '12+34=',
  sampling_params: { n: 4, temperature: 1, max_new_tokens: 40, ignore_eos: true, sampling_seed: 7 },
  return_logprob: true
}

async function metrics ({ app }: Server): Promise<string> {
  return (await app.inject('/metrics')).body
}

t.test('a server that guesses gives the same replies, and counts its guesses', async t => {
  const plain = await serve(t)
  const guessing = await serve(t, { speculative: 'siblings', speculativeNumDraftTokens: 5 })
  t.match((await guessing.get('/server_info')).body, { speculative: 'siblings', speculative_num_draft_tokens: 5 })
  t.match((await plain.get('/server_info')).body, { speculative: 'off', speculative_num_draft_tokens: null })
  t.match((await guessing.get('/server_info?config_format=json')).body.vllm_config.speculative_config, {
    method: 'siblings',
    num_speculative_tokens: 5
  })
  t.match(
    await metrics(guessing),
    /^vllm:spec_decode_num_draft_tokens_total\{[^}]*\} 0\n[^]*^sglang:spec_accept_length\{[^}]*\} 0$/m
  )
  for (let epoch = 0; epoch < 3; epoch++) {
    const visible = async (server: Server): Promise<unknown[]> =>
      (await server.ok('/generate', BODY)).map((one: any) => [one.text, one.meta_info.output_token_logprobs])
    t.strictSame(await visible(guessing), await visible(plain))
  }
  const text = await metrics(guessing)
  const read = (name: string): number => Number(new RegExp(`^${name}(?:\\{[^}]*\\})? (.*)$`, 'm').exec(text)?.[1])
  const { drafts, draftTokens, acceptedTokens } = guessing.engine.stats
  t.ok(acceptedTokens > 0)
  for (const server of ['refit', 'vllm']) {
    t.equal(read(`${server}:spec_decode_num_drafts_total`), drafts)
    t.equal(read(`${server}:spec_decode_num_draft_tokens_total`), draftTokens)
    t.equal(read(`${server}:spec_decode_num_accepted_tokens_total`), acceptedTokens)
  }
  t.equal(read('sglang:spec_accept_rate'), acceptedTokens / draftTokens)
  t.equal(read('sglang:spec_accept_length'), 1 + acceptedTokens / drafts)
  t.notMatch(await metrics(plain), /:spec_/, 'a server that does not guess has none of them')
})
