import { cpSync, existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join, posix } from 'node:path'
import { linksOf, resolveTarget } from './links.ts'

/** The page's place in the site: pages of docs/ lie at its root, and the README is its first page. */
export function placeOf (page: string): string {
  if (page === 'README.md') return 'index.md'
  const path = page.replace(/^docs\//, '')
  // A folder's README is the page of the folder.
  return path.replace(/(^|\/)README\.md$/, '$1index.md')
}

/**
 * A page for the site: links lead to the places of other pages. Links to files that are no pages stay as text, because
 * the site has no copy of the repository.
 */
export function toSitePage (page: string, text: string, pages: ReadonlySet<string>): string {
  let result = ''
  let at = 0
  for (const { text: label, target, from, to } of linksOf(text)) {
    const { path, anchor } = resolveTarget(page, target)
    const folderPage = posix.join(path, 'README.md')
    const goal = pages.has(path) ? path : pages.has(folderPage) ? folderPage : null
    result += text.slice(at, from)
    at = to
    if (goal === null) {
      result += label
      continue
    }
    const way = posix.relative(posix.dirname(placeOf(page)), placeOf(goal))
    result += `[${label}](./${way}${anchor === '' ? '' : `#${anchor}`})`
  }
  return escapeForVue(result + text.slice(at))
}

/** Outside of code, Vue would take {{ }} and <name> for its own. */
function escapeForVue (text: string): string {
  let isCode = false
  return text
    .split('\n')
    .map(line => {
      if (/^\s*(```|~~~)/.test(line)) isCode = !isCode
      if (isCode) return line
      return line
        .split(/(`+[^`]+`+)/)
        .map((part, i) =>
          i % 2 === 1 ? part : part.replaceAll('{{', '&#123;&#123;').replace(/<(?=[a-z][a-z ]*>)/gi, '&lt;')
        )
        .join('')
    })
    .join('\n')
}

/** Writes all pages into a folder. */
export function writePages (root: string, pages: readonly string[], folder: string): void {
  rmSync(folder, { recursive: true, force: true })
  const all = new Set(pages)
  for (const page of pages) {
    const file = join(folder, placeOf(page))
    mkdirSync(dirname(file), { recursive: true })
    writeFileSync(file, toSitePage(page, readFileSync(join(root, page), 'utf8'), all))
  }
  const images = join(root, 'docs/images')
  if (existsSync(images)) cpSync(images, join(folder, 'images'), { recursive: true })
}
