import { execFileSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { anchorsOf, deadLinks, linksOf } from '../../scripts/site/links.ts'
import { placeOf, toSitePage } from '../../scripts/site/pages.ts'
import { slug } from '../../scripts/site/slug.ts'
import { TOPICS } from '../../scripts/site/topics.ts'
import { packageRoot } from '../../src/root.ts'

const PAGES = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '*.md'], {
  cwd: packageRoot,
  encoding: 'utf8'
})
  .split('\n')
  .filter(page => page !== '' && existsSync(join(packageRoot, page)))

t.test('no page of the repository has a dead link', t => {
  t.ok(PAGES.includes('README.md') && PAGES.length > 40)
  t.strictSame(deadLinks(packageRoot, PAGES), [])
  t.end()
})

t.test('dead links and headings are found', t => {
  const root = t.testdir({
    docs: {
      'a.md':
        '# A\n\n[b](b.md#there) [c](b.md#gone) [d](none.md) [up](../../out.md) [self](#a) [web](https://x.y/z)\n' +
        '`[code](none.md)`\n```\n[more](none.md)\n```\n[folder](../docs)\n',
      'b.md': '# B\n## There\n'
    }
  })
  t.strictSame(deadLinks(root, ['docs/a.md']), [
    'docs/a.md: b.md#gone: there is no such heading',
    'docs/a.md: none.md: there is no such file',
    'docs/a.md: ../../out.md: there is no such file'
  ])
  t.end()
})

t.test('headings have the anchors that GitHub gives them', t => {
  t.equal(slug('refit bench'), 'refit-bench')
  t.equal(slug('`/generate`, and (more)'), 'generate-and-more')
  t.equal(slug("SGLang's __init__ — GPUs"), 'sglangs-__init__--gpus')
  t.strictSame([...anchorsOf('# One\n## One\n```\n# no\n```\n### [A](b.md) two ###\n')], ['one', 'one-1', 'a-two'])
  t.end()
})

t.test('links are found with their texts and places', t => {
  const page = 'x [a [b]](c.md "title") ![d](e.png) `[f](g.md)` [h](mailto:i@j)'
  t.match(linksOf(page), [{ text: 'a [b]', target: 'c.md' }, { text: 'd', target: 'e.png' }])
  t.equal(linksOf(page).length, 2)
  t.end()
})

t.test('pages get their places in the site, and links follow', t => {
  t.equal(placeOf('README.md'), 'index.md')
  t.equal(placeOf('docs/trainers/README.md'), 'trainers/index.md')
  t.equal(placeOf('docs/bench.md'), 'bench.md')
  t.equal(placeOf('clients/python/README.md'), 'clients/python/index.md')
  const pages = new Set(['README.md', 'docs/bench.md', 'docs/trainers/README.md', 'clients/python/README.md'])
  const text =
    '[a](../../README.md#top) [b](../bench.md) [c](../../clients/python) [d](../../src/main.ts) {{ x }} <url>'
  t.equal(
    toSitePage('docs/trainers/README.md', text, pages),
    '[a](./../index.md#top) [b](./../bench.md) [c](./../clients/python/index.md) d &#123;&#123; x }} &lt;url>'
  )
  t.end()
})

t.test('the sidebar has every page of docs/, and no other', t => {
  const places = new Set(PAGES.filter(page => !page.startsWith('docs/site/')).map(placeOf))
  const listed = TOPICS.flatMap(({ items }) =>
    items.map(({ link }) => `${link.slice(1)}${/(^|\/)$/.test(link.slice(1)) ? 'index' : ''}.md`)
  )
  t.strictSame(listed.filter(page => !places.has(page)), [])
  const missing = PAGES.filter(page => /^docs\/(?!site\/)/.test(page)).map(placeOf).filter(page =>
    !listed.includes(page)
  )
  t.strictSame(missing, [])
  t.equal(new Set(listed).size, listed.length)
  t.end()
})
