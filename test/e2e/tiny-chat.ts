import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { RefitPluginOptions } from '../../src/app/plugin.ts'
import { buildServer } from '../../src/app/server.ts'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'
import { randomValues, writeModelFolder } from '../helpers/make-checkpoint.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

/** Opens the reasoning if the request sets `thinking`, and closes it if it sets it to false. */
const TEMPLATE = "{% for message in messages %}<|user|>{{ message.role }}\n{{ message.content or '' }}<|end|>\n" +
  '{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% if thinking is defined %}<think>\n' +
  '{% if not thinking %}</think>\n{% endif %}{% endif %}{% endif %}'

/** Tokens of the vocabulary. */
export const THINK = 483
export const END_OF_THINK = 484

/**
 * A model of random weights with a real byte-level vocabulary, which has <think> and </think> as tokens. Returns a
 * function that starts servers of it.
 */
export async function tinyChat (t: Test): Promise<(options?: Partial<RefitPluginOptions>) => Promise<string>> {
  process.env['REFIT_NATIVE'] = join(packageRoot, 'build/faults/refit.node')
  const folder = mkdtempSync(join(tmpdir(), 'refit-chat-'))
  const text = join(packageRoot, 'test/fixtures/text/qwen-like')
  const size = { vocab_size: 512, max_position_embeddings: 2048 }
  writeModelFolder(folder, { ...tinyConfig('Qwen3ForCausalLM'), ...size }, { values: randomValues(3) })
  copyFileSync(join(text, 'tokenizer.json'), join(folder, 'tokenizer.json'))
  writeFileSync(
    join(folder, 'tokenizer_config.json'),
    JSON.stringify({ chat_template: TEMPLATE, eos_token: '<|end|>' })
  )
  const tokenizer = (await loadTokenizer(folder))!
  const engine = await createEngine(folder, { threads: 1, maxTotalTokens: 8192, vocabulary: tokenizer.vocabulary })
  const servers: { close: () => Promise<unknown> }[] = []
  t.teardown(async () => {
    for (const server of servers) await server.close()
    await engine.close()
    rmSync(folder, { recursive: true, force: true })
  })
  return async options => {
    const server = await buildServer({ ...options, engine, tokenizer, port: 0, closeGraceMs: 100 })
    servers.push(server)
    return server.listeningOrigin
  }
}
