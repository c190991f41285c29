import { execFileSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../src/root.ts'
import { deadLinks } from './site/links.ts'
import { writePages } from './site/pages.ts'

// Builds the docs site into build/site. usage: npm run docs:site. A dead link fails it.

/** Markdown files that are no pages. */
const OTHERS = /^(bench\/results|test|docs\/site)\//
const SITE = join(packageRoot, 'docs/site')
const OUT = join(packageRoot, 'build/site')

const run = (folder: string, command: string, ...args: string[]): void => {
  execFileSync(command, args, { cwd: folder, stdio: 'inherit' })
}

const pages = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '*.md'], {
  cwd: packageRoot,
  encoding: 'utf8'
})
  .split('\n')
  .filter(page => page !== '' && !OTHERS.test(page) && existsSync(join(packageRoot, page)))

const dead = deadLinks(packageRoot, pages)
if (dead.length > 0) {
  console.error(dead.join('\n'))
  process.exit(1)
}
writePages(packageRoot, pages, join(SITE, 'pages'))
if (!existsSync(join(SITE, 'node_modules'))) run(SITE, 'npm', 'ci', '--ignore-scripts', '--no-audit', '--no-fund')
run(SITE, 'npx', '--no-install', 'vitepress', 'build')

// The references of the HTTP API, one page each.
for (const name of ['openapi', 'gateway']) {
  const file = join(OUT, 'api', `${name}.html`)
  mkdirSync(join(OUT, 'api'), { recursive: true })
  const source = join(packageRoot, 'openapi', `${name}.json`)
  run(packageRoot, 'npx', '--no-install', 'redocly', 'build-docs', source, '-o', file, '--inlineBundle')
  cpSync(source, join(OUT, 'api', `${name}.json`))
}
console.log(`${pages.length} pages in ${OUT}`)
