import { appendFileSync, mkdirSync, readFileSync, writeFileSync, existsSync } from 'node:fs'
import { cpus } from 'node:os'
import { join } from 'node:path'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'

/** One figure: refit's, that of the alternative, their ratio (above 1: refit is better), and the required ratio. */
export interface Figure {
  figure: string
  ours: string
  other: string
  ratio: number
  goal: number
}

/** Prints a table of figures and keeps it under bench/results/. `rivals`: the compared programs with versions. */
export function report (name: string, figures: Figure[], rivals?: string): void {
  const head = `${new Date().toISOString().slice(0, 10)} · ${cpus()[0]?.model ?? 'unknown CPU'} x ${cpus().length} · ${
    native().isas()[0]
  } · Node ${process.versions.node}${rivals === undefined ? '' : ` · ${rivals}`}`
  const rows = figures.map(f =>
    `| ${f.figure} | ${f.ours} | ${f.other} | ${f.ratio.toFixed(2)} | ${f.goal.toFixed(2)} | ${
      f.ratio >= f.goal ? 'yes' : 'NO'
    } |`
  )
  const table = [
    '| figure | refit | compared with | ratio | goal | reached |',
    '| --- | --- | --- | --- | --- | --- |',
    ...rows
  ]
    .join('\n')
  console.log(`\n${head}\n\n${table}\n`)
  const file = join(packageRoot, 'bench/results', `${name}.md`)
  mkdirSync(join(packageRoot, 'bench/results'), { recursive: true })
  if (!existsSync(file)) writeFileSync(file, `# ${name}\n`)
  if (!readFileSync(file, 'utf8').includes(table)) appendFileSync(file, `\n${head}\n\n${table}\n`)
}
