import t from 'tap'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { DIALECT_NAMES } from '../../src/app/dialects.ts'
import { configurationPage } from '../../src/config/configuration-page.ts'
import { FLAGS } from '../../src/config/parse-arguments.ts'
import { serveHelp } from '../../src/config/help.ts'
import { suggest } from '../../src/config/suggest.ts'
import { packageRoot } from '../../src/root.ts'

t.test('--help and the configuration page name every flag and every alias', async t => {
  const help = serveHelp()
  for (const flag of FLAGS.keys()) {
    if (!flag.startsWith('model')) t.match(help, `--${flag}`)
    t.match(configurationPage(DIALECT_NAMES), `\`--${flag}\``)
  }
})

t.test('--help keeps its lines within the width', async t => {
  for (const width of [60, 80, 120]) {
    // Names of flags with their values are never wrapped.
    const lines = serveHelp(width).split('\n').filter(line => !line.startsWith('  --'))
    t.ok(lines.every(line => line.length <= width), String(width))
  }
})

t.test('docs/configuration.md equals the output of "npm run docs"', async t => {
  t.equal(readFileSync(join(packageRoot, 'docs', 'configuration.md'), 'utf8'), configurationPage(DIALECT_NAMES))
})

t.test('a suggestion differs by at most one edit in a short word, and a third of a long one', async t => {
  t.equal(suggest('prot', ['host', 'port']), 'port')
  t.equal(suggest('xyz', ['host', 'port']), undefined)
  t.equal(suggest('mdoel-roots', ['model', 'model-root']), 'model-root')
  t.equal(suggest('', ['a']), 'a')
})
