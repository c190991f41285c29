import { cpSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../src/root.ts'
import { lintDocker } from './helpers/docker-lint.ts'

t.test('the Dockerfile, .dockerignore and docker-compose.yml agree with each other and the repository', async t => {
  t.same(lintDocker(packageRoot), [])
})

/** A change to one of the files, and the expected message of the lint. */
const ERRORS: [what: string, file: string, from: string | RegExp, to: string, fault: RegExp][] = [
  [
    'a source that is not there',
    'Dockerfile',
    'COPY package.json',
    'COPY packages.json',
    /^build: COPY packages\.json does not exist$/
  ],
  [
    'a source that is ignored',
    '.dockerignore',
    /$/,
    '\npackage-lock.json\n',
    /^build: COPY package-lock\.json is excluded/
  ],
  [
    'a source that a pattern ignores',
    '.dockerignore',
    /$/,
    '\n*.json\n',
    /^build: COPY package(-lock)?\.json is excluded/
  ],
  [
    'a source inside an ignored folder',
    'Dockerfile',
    'COPY package.json',
    'COPY build/native package.json',
    /^build: COPY build\/native is excluded/
  ],
  [
    'a COPY from a stage that is not there',
    'Dockerfile',
    '--from=build /refit',
    '--from=built /refit',
    /^cpu: COPY --from=built names no stage$/
  ],
  ['a target that is no stage', 'docker-compose.yml', 'target: gpu', 'target: cuda', /target cuda is no stage$/],
  ['no targets', 'docker-compose.yml', /, target: \w+/g, '', /builds no target$/],
  ['a stage under another name', 'Dockerfile', ' AS cpu', ' AS server', /target cpu is no stage$/],
  ['no user', 'Dockerfile', 'USER refit\n', '', /^gpu: runs as root$/],
  ['root again after another user', 'Dockerfile', 'USER node\n', 'USER node\nUSER root\n', /^cpu: runs as root$/],
  ['root by its number', 'Dockerfile', 'USER node\n', 'USER 0:0\n', /^cpu: runs as root$/],
  ['no port', 'Dockerfile', 'EXPOSE 30000\n', '', /^cpu: has no EXPOSE$/],
  ['no entry point', 'Dockerfile', /ENTRYPOINT.*\n/, '', /^cpu: has no ENTRYPOINT$/],
  [
    'the latest image',
    'Dockerfile',
    'node:22-slim AS cpu',
    'node:latest AS cpu',
    /^cpu: node:latest is no fixed version$/
  ],
  [
    'an image without a tag',
    'Dockerfile',
    'node:22-slim AS build',
    'registry:5000/node AS build',
    /^build: registry:5000\/node has no tag$/
  ],
  [
    'the latest image in compose',
    'docker-compose.yml',
    'build: { context: ., target: cpu }',
    'build: { context: ., target: cpu }\n    image: refit:latest',
    /^docker-compose\.yml: refit:latest/
  ]
]

for (const [what, file, from, to, fault] of ERRORS) {
  t.test(`the lint finds ${what}`, async t => {
    const folder = copy(t)
    t.same(lintDocker(folder), [], 'nothing before')
    const before = readFileSync(join(folder, file), 'utf8')
    const after = before.replace(from, to)
    t.not(after, before, 'the error is planted')
    writeFileSync(join(folder, file), after)
    const faults = lintDocker(folder)
    t.ok(faults.length > 0 && faults.every(text => fault.test(text)), faults.join('\n') || 'no fault found')
  })
}

t.test('a file that an exception in .dockerignore includes may be copied', async t => {
  const folder = copy(t)
  writeFileSync(join(folder, '.dockerignore'), '*.json\n!package*.json\n')
  t.same(lintDocker(folder), [])
})

function copy (t: Test): string {
  const folder = t.testdir()
  for (const name of ['Dockerfile', '.dockerignore', 'docker-compose.yml', 'package.json', 'package-lock.json']) {
    cpSync(join(packageRoot, name), join(folder, name))
  }
  mkdirSync(join(folder, 'build/native'), { recursive: true })
  return folder
}
