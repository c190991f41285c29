import { mkdirSync } from 'node:fs'
import { join } from 'node:path'
import type { Test } from 'tap'
import { changed, makeBase, weightsOf } from './published-deltas.ts'
import type { Weights } from './published-deltas.ts'

/**
 * A host with a base checkpoint, a local one, and a folder of published versions; `versions` has the expected tensors
 * of each.
 */
export class PublishedHost {
  readonly root: string
  readonly base: string
  readonly local: string
  readonly source: string
  readonly files: string[]
  readonly versions: Weights[]

  constructor (root: string) {
    this.root = root
    this.base = join(root, 'base')
    this.local = join(root, 'local')
    this.source = join(root, 'published')
    const { files, weights } = makeBase(this.base)
    this.files = files
    this.versions = [weights]
    mkdirSync(this.source)
  }

  /** The next version's number. */
  next (): number {
    const version = this.versions.length
    this.versions.push(changed(this.versions.at(-1)!, version))
    return version
  }

  holdsIn (t: Test, folder: string, version: number): void {
    const got = weightsOf(folder, this.files)
    t.ok([...this.versions[version]!].every(([name, data]) => got.get(name)?.equals(data)), `holds version ${version}`)
  }
}

export const code = (name: string, message: RegExp): { code: string, message: RegExp } => ({ code: name, message })
