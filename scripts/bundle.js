import { execFileSync, spawnSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { dirname, join, relative, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'

// node scripts/bundle.js [--out build/bundle]
// Makes a folder that runs on another Linux machine without Node.js and without compilers: this Node.js (stripped), the
// compiled program with its packages, the addon, the models, and the compiled tests and benchmarks for GPUs with their
// Python parts. There:
//   sh bundle/unpack.sh /somewhere && cd /somewhere && node/bin/node bin/refit.js serve models/adder
// Build first: npm run build. The parts for GPUs need nvcc:
//   node scripts/build-native.js --cuda --cuda-tests; python3 native/probe/run.py --build

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const { out } = readOptions()

/** Needed. */
const PARTS = ['package.json', 'bin', 'dist', join('prebuilds', `${process.platform}-${process.arch}`), 'models', 'ui']
/** Taken where they are there, else said. */
const GPU_PARTS = [
  'scripts/test-gpu.js',
  'scripts/bench-gpu.js',
  'scripts/run-limited.js',
  'examples/adder',
  'examples/grpo',
  'examples/trainers',
  'clients/python',
  'test/contract',
  'test/interop',
  'test/gpu',
  'test/goldens',
  'docs/checksum.md',
  'bench/gpu',
  'bench/native',
  'bench/python',
  'bench/results',
  'native/probe',
  'build/cuda/programs',
  'build/probe'
]
/** Only the build of the addon needs them. */
const BUILD_ONLY = ['node-addon-api', 'node-api-headers']
/** Files of an npm package that no program reads. */
const UNREAD = new RegExp([
  String.raw`^(test|tests|docs|examples?|benchmarks?|\.github|\.vscode)(\/|$)`,
  String.raw`\.(md|markdown|map|ts|mts|cts|flow|yml|yaml)$`,
  String.raw`(^|\/)(tsconfig.*|\.[a-z]+rc|eslint\.config\.js)$`
]
  .join('|'))
/** Files of the GPU tests that only their build needs. */
const OBJECTS = /(^|\/)(CMakeFiles|__pycache__)(\/|$)|\.(o|a|d|cmake|txt|pyc|ninja)$|(^|\/)Makefile$/

need('strip', 'binutils')
need('xz', 'xz-utils')
need('tar', 'tar')
for (const part of PARTS) if (!existsSync(part)) fail(`${part} is missing: run "npm run build" first`)

const tree = `${out}.tree`
rmSync(tree, { recursive: true, force: true })
rmSync(out, { recursive: true, force: true })
mkdirSync(out, { recursive: true })
for (const part of PARTS) copy(part)
const absent = GPU_PARTS.filter(part => !existsSync(part))
for (const part of GPU_PARTS) if (!absent.includes(part)) copy(part, OBJECTS)
for (const folder of productionPackages()) copyPackage(folder)
mkdirSync(join(tree, 'native'), { recursive: true })
stripPrograms()
tryIt()

// The programs have much code in common, which a dictionary of 64 MB finds.
execFileSync('tar', ['-cJf', join(out, 'refit.tar.xz'), '--owner=0', '--group=0', '-C', tree, '.'], {
  env: { ...process.env, XZ_OPT: '-9' }
})
cpSync(packedNode(), join(out, 'node.xz'))
writeFileSync(join(out, 'unpack.sh'), unpackScript(), { mode: 0o755 })
const unpacked = bytes(tree)
rmSync(tree, { recursive: true, force: true })
const files = readdirSync(out).map(name => `${name} ${megabytes(statSync(join(out, name)).size)}`)
console.log(
  `${relative(root, out) || out}: ${megabytes(bytes(out))} MB (${files.join(', ')}); unpacked ${
    megabytes(unpacked)
  } MB and Node.js`
)
if (absent.length > 0) console.log(`not there, left out: ${absent.join(', ')}`)

function readOptions () {
  try {
    const { values } = parseArgs({ options: { out: { type: 'string', default: join('build', 'bundle') } } })
    return { out: resolve(values.out) }
  } catch (error) {
    return fail(`${error.message}; usage: node scripts/bundle.js [--out FOLDER]`)
  }
}

function copy (part, but) {
  cpSync(part, join(tree, part), {
    recursive: true,
    filter: path => but === undefined || !but.test(relative(part, path))
  })
}

/** The folders of the packages that the program imports, directly or through others. */
function productionPackages () {
  const { stdout } = spawnSync('npm', ['ls', '--omit=dev', '--all', '--parseable'], { encoding: 'utf8' })
  const folders = stdout.split('\n').slice(1).filter(line => line !== '').map(line => relative(root, line))
  if (folders.length === 0 || !folders.every(folder => existsSync(folder))) {
    fail('"npm ls --omit=dev" does not tell which packages are installed: run "npm ci"')
  }
  return folders.filter(folder => !BUILD_ONLY.some(name => folder.endsWith(join('node_modules', name))))
}

function copyPackage (folder) {
  cpSync(folder, join(tree, folder), {
    recursive: true,
    filter: path => {
      const inside = relative(folder, path)
      return inside !== 'node_modules' && !inside.startsWith('node_modules/') && !UNREAD.test(inside)
    }
  })
}

/** Removes symbols, a large part of compiled programs. Kernels are data and stay. */
function stripPrograms () {
  for (const folder of ['prebuilds', 'build'].map(name => join(tree, name)).filter(existsSync)) {
    for (const name of readdirSync(folder, { recursive: true, encoding: 'utf8' })) {
      const path = join(folder, name)
      if (statSync(path).isFile()) spawnSync('strip', ['--strip-unneeded', path], { stdio: 'ignore' })
    }
  }
}

/**
 * Starts an engine, because an addon from other sources than the program's would otherwise fail on the other machine.
 */
function tryIt () {
  const script = "import('./dist/src/index.js').then(async refit =>" +
    "(await refit.createEngine('models/adder', { threads: 1, maxTotalTokens: 256 })).close())"
  const { status, stderr } = spawnSync(process.execPath, ['-e', script], { cwd: tree, encoding: 'utf8' })
  if (status !== 0) fail(`what is built does not run, build it again ("npm run build"):\n${stderr}`)
}

/** This Node.js, stripped and packed. Kept in build/, because packing takes half a minute. */
function packedNode () {
  const packed = join('build', `node-${process.version}-${process.arch}.xz`)
  if (!existsSync(packed)) {
    const plain = join('build', `node-${process.pid}`)
    mkdirSync('build', { recursive: true })
    execFileSync('strip', ['-o', plain, process.execPath])
    execFileSync('xz', ['-6', '-T2', plain])
    renameSync(`${plain}.xz`, packed)
  }
  return packed
}

/** Not every machine has xz. Machines with torch have a Python. */
function unpackScript () {
  return `#!/bin/sh
# Unpacks refit into a folder (default: ./refit): sh unpack.sh FOLDER
set -e
from=$(cd "$(dirname "$0")" && pwd)
to=\${1:-refit}
mkdir -p "$to/node/bin"
with_python='import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)'
plain () { if command -v xz > /dev/null; then xz -dc "$1"; else python3 -c "$with_python" "$1"; fi; }
plain "$from/node.xz" > "$to/node/bin/node.new" &
plain "$from/refit.tar.xz" | tar -xf - --no-same-owner -C "$to"
wait $!
chmod 755 "$to/node/bin/node.new"
mv "$to/node/bin/node.new" "$to/node/bin/node"
"$to/node/bin/node" "$to/bin/refit.js" --version
`
}

function bytes (folder) {
  return readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .map(name => statSync(join(folder, name)))
    .filter(entry => entry.isFile())
    .reduce((sum, { size }) => sum + size, 0)
}

function megabytes (count) {
  return (count / 1e6).toFixed(1)
}

function need (command, name) {
  if (spawnSync(command, ['--version'], { stdio: 'ignore' }).error !== undefined) {
    fail(`${command} was not found: install it (on Debian or Ubuntu: apt-get install -y ${name})`)
  }
}

function fail (message) {
  console.error(`refit: ${message}`)
  return process.exit(1)
}
