#!/usr/bin/env node
import { existsSync } from 'node:fs'

const [major, minor] = process.versions.node.split('.').map(Number)
if (major < 20 || (major === 20 && minor < 19)) fail(`refit needs Node.js 20.19 or newer; this is ${process.version}`)

const main = new URL('../dist/src/main.js', import.meta.url)
if (!existsSync(main)) fail('refit is not built yet: run "npm ci" (or "npm run build") in its folder')
await (await import(main)).ended

function fail (message) {
  console.error(message)
  process.exit(1)
}
