import { existsSync, readFileSync, statSync } from 'node:fs'
import { dirname, join, normalize } from 'node:path'
import { slug } from './slug.ts'

/** A link of a Markdown page to another file or heading of the repository. */
export interface Link {
  /** Text between the brackets. */
  text: string
  /** As it is written: `page.md#heading`. */
  target: string
  /** Its place in the page. */
  from: number
  to: number
}

/** Code is not Markdown, and keeps its length so that positions stay. */
function withoutCode (page: string): string {
  const blank = (code: string): string => code.replace(/[^\n]/g, ' ')
  return page.replace(/^(```+|~~~+)[^\n]*\n.*?^\1[^\n]*$/gms, blank).replace(/(`+)(?!`).*?[^`]\1(?!`)/gs, blank)
}

/** Links inside the repository; those to other sites are left out. */
export function linksOf (page: string): Link[] {
  const found = [
    ...withoutCode(page).matchAll(/!?\[((?:[^[\]]|\[[^[\]]*\])*)\]\(\s*<?([^()\s>]+)>?(?:\s+"[^"]*")?\s*\)/g)
  ]
  return found
    .map(match => ({
      text: page.slice(match.index, match.index + match[0].length).replace(/^!?\[(.*)\]\(.*$/s, '$1'),
      target: match[2]!,
      from: match.index,
      to: match.index + match[0].length
    }))
    .filter(({ target }) => !/^(?:[a-z][a-z0-9+.-]*:|\/\/)/i.test(target))
}

/** The anchors of a page's headings. */
export function anchorsOf (page: string): Set<string> {
  const text = page.replace(/^(```+|~~~+)[^\n]*\n.*?^\1[^\n]*$/gms, '')
  const anchors = new Set<string>()
  for (const [, heading] of text.matchAll(/^#{1,6}\s+(.+?)\s*#*$/gm)) {
    const plain = heading!.replace(/\[([^\]]*)\]\([^)]*\)/g, '$1')
    const base = slug(plain)
    let anchor = base
    for (let i = 1; anchors.has(anchor); i++) anchor = `${base}-${i}`
    anchors.add(anchor)
  }
  for (const [, name] of text.matchAll(/<a (?:id|name)="([^"]+)"/g)) anchors.add(name!)
  return anchors
}

/** Splits a target into the path in the repository and the anchor. */
export function resolveTarget (page: string, target: string): { path: string, anchor: string } {
  const [path = '', anchor = ''] = decodeURI(target).split('#', 2)
  return { path: path === '' ? page : normalize(join(dirname(page), path)), anchor }
}

/** The links of these pages that lead nowhere: `docs/a.md: b.md#c: there is no such heading`. */
export function deadLinks (root: string, pages: readonly string[]): string[] {
  const read = (path: string): string => readFileSync(join(root, path), 'utf8')
  return pages.flatMap(page =>
    linksOf(read(page)).flatMap(({ target }) => {
      const { path, anchor } = resolveTarget(page, target)
      if (path.startsWith('..') || !existsSync(join(root, path))) return [`${page}: ${target}: there is no such file`]
      if (anchor === '' || !path.endsWith('.md') || statSync(join(root, path)).isDirectory()) return []
      return anchorsOf(read(path)).has(anchor) ? [] : [`${page}: ${target}: there is no such heading`]
    })
  )
}
