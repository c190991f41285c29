import { cpSync, mkdirSync, mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { packageRoot } from '../../../src/root.ts'
import type { Random } from './random.ts'
import type { Report } from './report.ts'
import { Target } from './target.ts'

export const API_KEY = 'hostile-api-key'
export const ADMIN_KEY = 'hostile-admin-key'
const MIB = 2 ** 20
/**
 * Most resident memory of a server, in MiB: 250 for the program and the model, a heap of 512, the bodies, results and
 * staging that options allow, and buffers that the collector has not seen yet.
 */
export const MOST_MEMORY = 1400

const LIMITS = ['--max-request-memory', `${64 * MIB}`]
const ENGINE = ['--threads', '1', '--context-length', '256', '--max-total-tokens', '8192', '--random-seed', '1']
const PATIENCE = ['--group-timeout', '2', '--upload-timeout', '2', '--update-deadline', '10', '--version-wait', '1']

export interface Family {
  name: string
  /** Runs one round of attacks. */
  attack: (world: World, random: Random) => Promise<void>
}

/** The servers under attack, what they hold, and the folder that they may read. */
export class World {
  readonly report: Report
  /** No key; weights in `root`. */
  readonly open: Target
  /** With an API key and an admin key. */
  readonly keyed: Target
  /** In front of `open`. */
  readonly gateway: Target
  readonly folder: string
  /** Inside of it, `open` may read weights. */
  readonly root: string
  readonly spool: string
  /** The form of an hour: attacks may take longer. */
  readonly isLong: boolean
  #good: string = ''

  private constructor (
    report: Report,
    isLong: boolean,
    folder: string,
    targets: { open: Target, keyed: Target, gateway: Target }
  ) {
    this.isLong = isLong
    this.report = report
    this.folder = folder
    this.root = join(folder, 'root')
    this.spool = join(folder, 'spool')
    ;({ open: this.open, keyed: this.keyed, gateway: this.gateway } = targets)
  }

  static async start (report: Report, isLong: boolean): Promise<World> {
    const folder = mkdtempSync(join(tmpdir(), 'refit-hostile-'))
    for (const [from, to] of [['adder-base', 'root'], ['adder', 'root'], ['adder', 'outside']] as const) {
      mkdirSync(join(folder, to), { recursive: true })
      cpSync(join(packageRoot, 'models', from), join(folder, to, from), { recursive: true })
    }
    mkdirSync(join(folder, 'spool'))
    const root = join(folder, 'root')
    const serve = ['serve', join(root, 'adder-base'), ...ENGINE, ...LIMITS, ...PATIENCE, '--model-root', root]
    const [open, keyed] = await Promise.all([
      Target.start('server', [...serve, '--upload-folder', join(folder, 'spool')]),
      Target.start('keyed server', [...serve, '--api-key', API_KEY, '--admin-api-key', ADMIN_KEY])
    ])
    const gateway = await Target.start('gateway', [
      'gateway',
      '--engine',
      open.url,
      '--health-interval',
      '0.2',
      '--engine-wait',
      '1'
    ])
    const world = new World(report, isLong, folder, { open, keyed, gateway })
    world.#good = await world.state()
    return world
  }

  get targets (): Target[] {
    return [this.open, this.keyed, this.gateway]
  }

  check (what: string, isGood: boolean, shows: () => string): void {
    this.report.check(what, isGood, shows)
  }

  /** The greedy answers, checksums and labels of both engines, and the answers of the gateway. */
  async state (): Promise<string> {
    const authorization = (key: string) => ({ headers: { authorization: `Bearer ${key}` } })
    const questions = ['12+34=', '999+1=', '7+8=', '500+499=']
    const parts: string[] = []
    for (const target of this.targets) {
      for (const text of questions) {
        const body = { text, sampling_params: { max_new_tokens: 6, temperature: 0 } }
        const reply = await target.call('/generate', { body, ...target === this.keyed ? authorization(API_KEY) : {} })
        const output = reply.status === 200
          ? (JSON.parse(reply.text) as { output_ids: number[] }).output_ids
          : reply.text
        parts.push(`${target.name} ${text} ${reply.status} ${JSON.stringify(output)}`)
      }
    }
    for (const target of [this.open, this.keyed]) {
      const admin = target === this.keyed ? authorization(ADMIN_KEY) : {}
      const checksum = await target.call('/weights_checker', { body: { action: 'checksum' }, ...admin })
      parts.push(
        `${target.name} checksums ${checksum.status} ${/"per_engine_checksum":"\w+"/.exec(checksum.text)?.[0]}`
      )
      const label = await target.call('/weight_version', target === this.keyed ? authorization(API_KEY) : {})
      parts.push(`${target.name} label ${label.status} ${label.text}`)
    }
    return parts.join('\n')
  }

  /** After a family: everything lives, answers as before, and holds no more memory than it may. */
  async settle (): Promise<void> {
    for (const target of this.targets) {
      const health = target.isAlive ? await target.call('/health', { timeoutMs: 30_000 }) : { status: 0, text: 'ended' }
      this.check(
        'the servers are alive',
        target.isAlive && health.status === 200,
        () =>
          `${target.name}: /health ${health.status} ${health.text}; exit ${target.child.exitCode} ` +
          `${target.child.signalCode}; its log:\n${target.log}`
      )
      if (!target.isAlive) throw new Error(`${target.name} has ended: nothing more can be attacked`)
      const { peak } = target.memory()
      this.check(
        `no server holds more than ${MOST_MEMORY} MiB`,
        peak <= MOST_MEMORY,
        () => `${target.name} held ${peak.toFixed(0)} MiB`
      )
    }
    let state = await this.state()
    // The gateway may still look at its engine again.
    for (let tries = 0; tries < 50 && state !== this.#good; tries++) {
      await new Promise(resolve => setTimeout(resolve, 100))
      state = await this.state()
    }
    this.check(
      'greedy answers, checksums and labels are unchanged',
      state === this.#good,
      () => `before:\n${this.#good}\nnow:\n${state}`
    )
    this.#good = state
    const left = readdirSync(this.spool)
    this.check('no file of an upload is left', left.length === 0, () => left.join(' '))
  }

  async stop (): Promise<void> {
    await Promise.all(this.targets.map(async target => await target.stop()))
    rmSync(this.folder, { recursive: true, force: true })
  }
}
