import { existsSync, readFileSync } from 'node:fs'
import { join, matchesGlob, normalize } from 'node:path'

interface Instruction {
  name: string
  words: string[]
}
interface Stage {
  name: string
  base: string
  instructions: Instruction[]
}

/**
 * Mistakes in the Dockerfile, .dockerignore and docker-compose.yml of a folder, as far as they can be found by reading.
 */
export function lintDocker (folder: string): string[] {
  const read = (name: string): string => readFileSync(join(folder, name), 'utf8')
  const stages = stagesOf(read('Dockerfile'))
  const ignored = ignoreRules(read('.dockerignore'))
  return [
    ...stages.flatMap(stage => [...baseFaults(stage, stages), ...copyFaults(stage, stages, folder, ignored)]),
    ...finalStages(stages).flatMap(finalFaults),
    ...targetFaults(read('docker-compose.yml'), stages)
  ]
}

function stagesOf (dockerfile: string): Stage[] {
  const stages: Stage[] = []
  for (
    const line of dockerfile.split('\n').filter(line => !/^\s*#/.test(line)).join('\n').replace(/\\\n/g, ' ').split(
      '\n'
    )
  ) {
    const [name, ...words] = line.trim().split(/\s+/)
    if (!name) continue
    if (name === 'FROM') {
      const [base, , alias] = words.filter(word => !word.startsWith('--'))
      stages.push({ name: alias ?? String(stages.length), base: base ?? '', instructions: [] })
    } else stages.at(-1)?.instructions.push({ name, words })
  }
  return stages
}

/** The stages that no other stage builds on: the images that users get. */
function finalStages (stages: Stage[]): Stage[] {
  const used = new Set(
    stages.flatMap(({ base, instructions }) => [
      base,
      ...instructions.flatMap(({ words }) =>
        words
          .filter(word => word.startsWith('--from='))
          .map(word => word.slice(7))
      )
    ])
  )
  return stages.filter(({ name }) => !used.has(name))
}

function baseFaults ({ name, base }: Stage, stages: Stage[]): string[] {
  if (stages.some(stage => stage.name === base)) return []
  // A colon before the last slash is a registry's port.
  const tag = /:([^:/]+)$/.exec(base.replace(/@.*/, ''))?.[1]
  return tag === undefined && !base.includes('@')
    ? [`${name}: ${base} has no tag`]
    : tag === 'latest'
    ? [`${name}: ${base} is no fixed version`]
    : []
}

function copyFaults (
  { name, instructions }: Stage,
  stages: Stage[],
  folder: string,
  ignored: (path: string) => boolean
): string[] {
  return instructions.filter(instruction => instruction.name === 'COPY' || instruction.name === 'ADD').flatMap(
    ({ words }) => {
      const from = words.find(word => word.startsWith('--from='))?.slice(7)
      if (from !== undefined) {
        return stages.some(stage => stage.name === from)
          ? []
          : [`${name}: COPY --from=${from} names no stage`]
      }
      return words.filter(word => !word.startsWith('--')).slice(0, -1).flatMap(source => {
        if (!existsSync(join(folder, source))) return [`${name}: COPY ${source} does not exist`]
        return ignored(normalize(source)) ? [`${name}: COPY ${source} is excluded by .dockerignore`] : []
      })
    }
  )
}

/**
 * Docker's rules: patterns start at the root, a folder includes everything below it, the last match decides, `!`
 * includes a path again.
 */
function ignoreRules (text: string): (path: string) => boolean {
  const rules = text
    .split('\n')
    .map(line => line.trim())
    .filter(line => line !== '' && !line.startsWith('#'))
    .map(line => ({ back: line.startsWith('!'), pattern: normalize(line.replace(/^!/, '')).replace(/^\/|\/$/g, '') }))
  return path => {
    const parts = path.split('/')
    const prefixes = parts.map((_, i) => parts.slice(0, i + 1).join('/'))
    return rules.reduce(
      (out, { back, pattern }) => prefixes.some(prefix => matchesGlob(prefix, pattern)) ? !back : out,
      false
    )
  }
}

function finalFaults ({ name, instructions }: Stage): string[] {
  const last = (instruction: string): string[] | undefined =>
    instructions.filter(({ name }) => name === instruction).at(-1)?.words
  const user = last('USER')?.[0]
  return [
    ...user === undefined || /^(root|0)(:|$)/.test(user) ? [`${name}: runs as root`] : [],
    ...['EXPOSE', 'ENTRYPOINT'].filter(instruction => last(instruction) === undefined).map(instruction =>
      `${name}: has no ${instruction}`
    )
  ]
}

function targetFaults (compose: string, stages: Stage[]): string[] {
  const targets = [...compose.matchAll(/^[^#\n]*\btarget:\s*["']?([\w.-]+)/gm)].map(match => match[1]!)
  if (targets.length === 0) return ['docker-compose.yml builds no target']
  const images = [...compose.matchAll(/^[^#\n]*\bimage:\s*["']?([^\s"'},]+)/gm)].map(match => match[1]!)
  return [
    ...targets.filter(target => !stages.some(({ name }) => name === target)).map(target =>
      `docker-compose.yml: target ${target} is no stage`
    ),
    ...images.flatMap(base => baseFaults({ name: 'docker-compose.yml', base, instructions: [] }, []))
  ]
}
