import { execFileSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { basename, join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import type { Random } from '../lib/random.ts'
import type { Family, World } from '../lib/world.ts'

/** Longest that a path may take: FIFOs and devices would take for ever. */
const MOST_MS = 20_000

/** Paths that lead out of the roots, or to what is no file. */
export const jail: Family = {
  name: 'jail',
  attack: async (world, random) => {
    const folder = mkdtempSync(join(world.root, 'hostile-'))
    const outside = join(world.folder, 'outside', 'adder')
    try {
      for (const path of outsiders(world, folder, outside)) await absent(world, path)
      for (const [name, path] of await oddFiles(folder, outside)) await refused(world, name, path)
      await swapped(world, folder, outside)
      await pulls(world, folder, outside, random)
    } finally {
      rmSync(folder, { recursive: true, force: true })
    }
  }
}

/** Paths that are not in the roots, and paths that are not there. Nobody may learn which. */
function outsiders (world: World, folder: string, outside: string): string[] {
  symlinkSync(outside, join(folder, 'link'))
  symlinkSync(join(outside, 'model.safetensors'), join(folder, 'file.safetensors'))
  symlinkSync('/nothing', join(folder, 'dangling'))
  symlinkSync('loop', join(folder, 'loop'))
  symlinkSync('/proc/self/root', join(folder, 'proc'))
  return [
    outside,
    join(outside, 'model.safetensors'),
    join(world.folder, 'nothing'),
    `${folder}/nothing`,
    `${world.root}/../outside/adder`,
    `${folder}/../../outside/adder`,
    `${folder}/link/../../outside/adder`,
    `${folder}/link`,
    `${folder}/file.safetensors`,
    `${folder}/dangling`,
    `${folder}/loop`,
    `${folder}/proc${outside}`,
    `/proc/self/root${outside}`,
    `/proc/self/cwd/../..${outside}`,
    `/dev/fd/../../..${outside}`,
    '/',
    '/etc/passwd',
    '/dev/zero',
    '/dev/stdin',
    '/proc/self/mem',
    '.',
    '..',
    '~',
    'file:///etc',
    `${folder}\0`,
    `${world.root}-not`,
    `${folder}/${'n'.repeat(5000)}`,
    `${folder}/${'n/'.repeat(3000)}`
  ]
}

async function load (world: World, path: string) {
  return await world.open.call('/update_weights_from_disk', { body: { model_path: path }, timeoutMs: 2 * MOST_MS })
}

async function absent (world: World, path: string): Promise<void> {
  const { status, text } = await load(world, path)
  const isGood = status === 400 && text.includes('is not there, or not inside the allowed roots (--model-root)')
  world.check(
    'a path outside and one that is not there get the same refusal',
    isGood,
    () => `${JSON.stringify(path.slice(0, 300))}: ${status} ${text.slice(0, 500)}`
  )
}

async function refused (world: World, name: string, path: string): Promise<void> {
  const { status, text, ms } = await load(world, path)
  const shows = (): string => `${name}: ${status} after ${ms.toFixed(0)} ms ${text.slice(0, 500)}`
  world.check('what is no checkpoint is refused with a 4xx', status >= 400 && status < 500, shows)
  world.check(`what is no checkpoint is refused within ${MOST_MS / 1000} s`, ms < MOST_MS, shows)
  world.check('no refusal has a part of a file', !text.includes('root:x:0'), shows)
}

/** Folders inside the roots whose files are something else. */
async function oddFiles (folder: string, outside: string): Promise<[name: string, path: string][]> {
  const made: [string, string][] = []
  const make = (name: string, fill: (path: string) => void): void => {
    const path = join(folder, `odd-${made.length}`)
    cpSync(outside, path, { recursive: true })
    fill(path)
    made.push([name, path])
  }
  const instead = (file: string, put: (path: string) => void) => (path: string): void => {
    rmSync(join(path, file), { force: true })
    put(join(path, file))
  }
  const index = (map: unknown): (path: string) => void => path => {
    rmSync(join(path, 'model.safetensors'))
    writeFileSync(join(path, 'model.safetensors.index.json'), JSON.stringify(map))
  }
  const weights = 'model.safetensors'
  make('a FIFO', instead(weights, path => execFileSync('mkfifo', [path])))
  make('a FIFO as the index', instead('model.safetensors.index.json', path => execFileSync('mkfifo', [path])))
  make('a folder', instead(weights, path => mkdirSync(path)))
  make('a link to a device', instead(weights, path => symlinkSync('/dev/zero', path)))
  make('a link out', instead(weights, path => symlinkSync(join(outside, weights), path)))
  make('a link to passwd', instead(weights, path => symlinkSync('/etc/passwd', path)))
  make('an empty file', instead(weights, path => writeFileSync(path, '')))
  make('a large empty file', instead(weights, path => execFileSync('truncate', ['-s', '1T', path])))
  make('an index that leads out', index({ weight_map: { 'model.norm.weight': `../../../outside/adder/${weights}` } }))
  make('an index to passwd', index({ weight_map: { 'model.norm.weight': '/etc/passwd' } }))
  make('an index to itself', index({ weight_map: { 'model.norm.weight': 'model.safetensors.index.json' } }))
  make(
    'an index of 100,000 files',
    index({
      weight_map: Object.fromEntries(Array.from({ length: 100_000 }, (_, i) => [`t${i}`, `f${i}.safetensors`]))
    })
  )
  make('an index of a list', index([1]))
  make('an index that is a link', instead('model.safetensors.index.json', path => symlinkSync('/etc/passwd', path)))
  const socket = createServer()
  const path = join(folder, 'socket')
  mkdirSync(path)
  await new Promise<void>(resolve => socket.listen(join(path, weights), resolve))
  socket.unref()
  made.push(['a socket', path])
  return made
}

/** A link that leads inside and outside in turn, while updates read it. Never may the outside's weights come in. */
async function swapped (world: World, folder: string, outside: string): Promise<void> {
  const base = join(world.root, 'adder-base')
  const link = join(folder, 'swapped')
  const temporary = join(folder, 'swapped-next')
  const state = { isOver: false }
  const swap = (async () => {
    for (let turn = 0; !state.isOver; turn++) {
      symlinkSync(turn % 2 === 0 ? outside : base, temporary)
      execFileSync('mv', ['-T', temporary, link])
      await sleep(1)
    }
  })()
  for (let i = 0; i < 40; i++) {
    const { status, text } = await load(world, link)
    world.check(
      'a link that is swapped is followed inside only',
      status === 200 || status === 400,
      () => `${status} ${text.slice(0, 500)}`
    )
  }
  state.isOver = true
  await swap
  // World.settle compares the checksums: loading the base changes none.
}

/** Pulls whose folders are elsewhere, or hold links. */
async function pulls (world: World, folder: string, outside: string, random: Random): Promise<void> {
  const base = join(world.root, 'adder-base')
  const before = readFileSync(join(outside, 'config.json'))
  const inside = join(folder, 'local')
  mkdirSync(join(inside, '.weight_sync'), { recursive: true })
  execFileSync('mkfifo', [join(inside, '.weight_sync', 'lock')])
  const linked = join(folder, 'linked')
  mkdirSync(linked)
  symlinkSync(outside, join(linked, '.weight_sync'))
  const pairs = [
    [outside, folder],
    [folder, outside],
    [inside, folder],
    [linked, folder],
    [`${folder}/link`, folder],
    ['/etc', '/etc'],
    [`${folder}/${'n'.repeat(300)}`, folder],
    [`${base}/config.json`, folder],
    [`${folder}/../../outside/new`, folder],
    ['', ''],
    [`${folder}\0`, folder]
  ]
  for (const [local, source] of pairs) {
    for (const version of [0, 1 + random.below(100)]) {
      const { status, text, ms } = await world.open.call('/pull_weights', {
        body: { local_checkpoint_dir: local, source_dir: source, target_version: version },
        timeoutMs: 2 * MOST_MS
      })
      const isGood = status >= 400 && status < 500 && ms < MOST_MS
      world.check(
        'a pull into or from elsewhere is refused',
        isGood,
        () => `${local} ${source} ${version}: ${status} after ${ms.toFixed(0)} ms ${text.slice(0, 300)}`
      )
    }
  }
  const isWhole = readFileSync(join(outside, 'config.json')).equals(before) &&
    !existsSync(join(outside, 'state.json')) && !existsSync(join(outside, '..', 'new'))
  world.check('nothing outside is written', isWhole, () => basename(outside))
}
