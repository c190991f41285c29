import { spawnSync } from 'node:child_process'
import { chmodSync, existsSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs'
import { delimiter, join, resolve } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'

const script = join(packageRoot, 'scripts/build-native.js')

function build (
  args: string[],
  env: NodeJS.ProcessEnv = process.env
): { status: number | null, stdout: string, stderr: string } {
  return spawnSync(process.execPath, [script, ...args], { encoding: 'utf8', env })
}

/** Into a tree of a test's own. */
function copyScripts (root: string): void {
  for (const file of ['scripts/build-native.js', 'scripts/build-lock.js']) {
    writeFileSync(join(root, file), readFileSync(join(packageRoot, file)))
  }
}

/** A PATH on which only these programs are found, each made from a shell script. */
function pathWith (t: { testdir: () => string }, programs: Record<string, string>): NodeJS.ProcessEnv {
  const folder = t.testdir()
  for (const [name, body] of Object.entries(programs)) {
    writeFileSync(join(folder, name), `#!/bin/sh\n${body}\n`)
    chmodSync(join(folder, name), 0o755)
  }
  return { PATH: folder }
}

/** What decides about the code: everything but names of outputs and folders of headers. */
function essence (args: string[], folder: string): { source: string, flags: string[] } {
  const flags: string[] = []
  let source = ''
  for (let i = 0; i < args.length; i++) {
    const arg = args[i]!
    if (['-o', '-c', '-isystem', '-MF', '-MT'].includes(arg)) {
      i++
      if (arg === '-c') source = resolve(folder, args[i]!)
    } else if (/^-(f|m|O|D|W|std)/.test(arg) && !arg.startsWith('-MM')) flags.push(arg)
  }
  return { source, flags: [...new Set(flags.filter(flag => !/^-D\w+_EXPORTS$/.test(flag)))].sort() }
}

t.test('both ways of building compile the same files with the same flags', {
  skip: !existsSync(join(packageRoot, 'build/native/compile_commands.json')) && 'not built with CMake'
}, t => {
  const key = ({ source, flags }: { source: string, flags: string[] }): string => [source, ...flags].join(' ')
  interface Entry {
    command: string
    directory: string
  }
  const entries = JSON.parse(readFileSync(join(packageRoot, 'build/native/compile_commands.json'), 'utf8')) as Entry[]
  const cmake = entries.map(({ command, directory }) => key(essence(command.split(' ').slice(1), directory))).sort()
  const { status, stdout, stderr } = build(['--commands'])
  t.equal(status, 0, stderr)
  const plain = stdout.trim().split('\n').map(line => key(essence(JSON.parse(line) as string[], packageRoot))).sort()
  t.ok(cmake.length > 40)
  t.strictSame(plain, cmake)
  t.end()
})

t.test('a machine without a compiler is told what to install', t => {
  const { status, stderr } = build([], pathWith(t, {}))
  t.equal(status, 1)
  t.equal(
    stderr,
    'refit: no C++ compiler found (looked for g++, c++, clang++): install g++ >= 11 (on Debian or Ubuntu: apt-get install -y g++ cmake)\n'
  )
  const named = build([], { ...pathWith(t, {}), CXX: 'g++-99' })
  t.match(named.stderr, /^refit: no C\+\+ compiler found \(looked for g\+\+-99\)/)
  t.end()
})

t.test('a compiler that is too old is named with its version', t => {
  const { status, stderr } = build(
    [],
    pathWith(t, { 'g++': 'case "$1" in --version) echo "g++ (GCC) 9.4.0";; *) echo 9.4.0;; esac' })
  )
  t.equal(status, 1)
  t.equal(
    stderr,
    'refit: g++ is version 9.4.0, but refit needs g++ >= 11 for C++20; install a newer one or name it in CXX\n'
  )
  t.end()
})

t.test('another platform is refused in words', t => {
  for (const [platform, arch] of [['darwin', 'arm64'], ['win32', 'x64'], ['linux', 'ia32']]) {
    const pretend = join(t.testdir(), 'pretend.cjs')
    writeFileSync(
      pretend,
      `Object.defineProperty(process, 'platform', { value: '${platform}' }); Object.defineProperty(process, 'arch', { value: '${arch}' })`
    )
    const { status, stderr } = spawnSync(process.execPath, ['--require', pretend, script], { encoding: 'utf8' })
    t.equal(status, 1)
    t.match(stderr, `refit: refit runs on Linux (x64 or arm64), this is ${platform} ${arch}: `)
  }
  t.end()
})

t.test('an unknown option is an error', t => {
  const { status, stderr } = build(['--fautls'])
  t.equal(status, 1)
  t.match(stderr, /^refit: unknown argument in "--fautls": expected any of --faults --tests /)
  t.end()
})

t.test(
  'the fallback compiles, keeps what is fresh, and compiles again what a header changed',
  { timeout: 300000 },
  t => {
    // A small tree with the script's folders: compiling the real one takes minutes.
    const root = t.testdir({ native: { core: {}, cpu: {}, transport: {}, binding: {} }, scripts: {} })
    writeFileSync(join(root, 'package.json'), '{"type":"module"}')
    copyScripts(root)
    symlinkSync(join(packageRoot, 'node_modules'), join(root, 'node_modules'))
    for (const map of ['native/binding/exports.map']) {
      writeFileSync(
        join(root, map),
        readFileSync(join(packageRoot, map))
      )
    }
    const write = (file: string, text: string): void => {
      writeFileSync(join(root, file), text)
    }
    const header = (answer: string): void => {
      write('native/core/answer.h', `#pragma once\n#define ANSWER "${answer}"\n`)
    }
    header('one')
    write('native/core/answer.cc', '#include "core/answer.h"\nconst char* answer() { return ANSWER; }\n')
    write('native/cpu/other_avx512.cc', '#if defined(__x86_64__) && !defined(__AVX512F__)\n#error flags\n#endif\n')
    write('native/transport/none.cc', 'int unused_symbol;\n')
    write(
      'native/binding/addon.cc',
      '#include <napi.h>\nconst char* answer();\nNapi::Object init(Napi::Env env, Napi::Object exports) {\n' +
        '  exports.Set("isas", Napi::Function::New(env, [](const Napi::CallbackInfo& info) -> Napi::Value { return Napi::String::New(info.Env(), answer()); }));\n  return exports;\n}\nNODE_API_MODULE(t, init)\n'
    )
    const run = (): string => {
      const { status, stdout, stderr } = spawnSync(process.execPath, [
        join(root, 'scripts/build-native.js'),
        '--no-cmake'
      ], { encoding: 'utf8' })
      t.equal(status, 0, stderr)
      return stdout
    }
    const built = join(root, `prebuilds/linux-${process.arch}/refit.node`)
    const answer = (): string =>
      spawnSync(process.execPath, ['-p', `require(${JSON.stringify(built)}).isas()`], { encoding: 'utf8' })
        .stdout
        .trim()
    t.match(run(), /^refit: prebuilds\/linux-\w+\/refit.node built in [\d.]+ s\n$/)
    t.equal(answer(), 'one')
    t.match(run(), /is up to date/)
    header('two')
    t.match(run(), /built in/)
    t.equal(answer(), 'two')
    write('native/core/answer.cc', 'const char* answer() { return 1; }\n')
    const broken = spawnSync(process.execPath, [join(root, 'scripts/build-native.js'), '--no-cmake'], {
      encoding: 'utf8'
    })
    t.equal(broken.status, 1)
    t.match(broken.stderr, /native\/core\/answer.cc:1:.*error:[^]*failed \(exit 1\)\n$/)
    t.equal(answer(), 'two', 'a failed build leaves the last binary in place')
    t.notOk(existsSync(join(root, 'build/native.lock')))

    // The CUDA library, where its sources are: wanted, unwanted, or left to the machine.
    write('native/core/answer.cc', '#include "core/answer.h"\nconst char* answer() { return ANSWER; }\n')
    mkdirSync(join(root, 'native/cuda'))
    write('native/cuda/CMakeLists.txt', '')
    const cuda = (wanted: string | undefined): { status: number | null, stdout: string, stderr: string } => {
      const env = { ...process.env, REFIT_CUDA: wanted }
      return spawnSync(process.execPath, [join(root, 'scripts/build-native.js'), '--no-cmake'], {
        encoding: 'utf8',
        env
      })
    }
    const never = cuda('0')
    t.equal(never.status, 0, never.stderr)
    t.match(never.stdout, /\nrefit: no CUDA library: REFIT_CUDA=0\n$/)
    const wrong = cuda('yes')
    t.equal(wrong.status, 1)
    t.equal(wrong.stderr, 'refit: REFIT_CUDA: expected 1 or 0, got "yes"\n')
    const left = cuda(undefined)
    t.equal(left.status, 0, left.stderr)
    t.match(
      left.stdout,
      /\nrefit: no CUDA library: there is no (NVIDIA GPU here|nvcc|CMake >= 3.18) \(REFIT_CUDA=1 insists on building it\)\n$/
    )
    const insisted = cuda('1')
    t.equal(insisted.status, 1)
    t.match(insisted.stderr, /^refit: the CUDA library needs (CMake >= 3.18 and make or ninja|nvcc)/)
    t.end()
  }
)

t.test('kinds of cards that refit cannot compute on are refused', {
  skip: !['nvcc', '/usr/local/cuda/bin/nvcc'].some(nvcc => spawnSync(nvcc, ['--version']).status === 0) && 'no nvcc'
}, t => {
  for (const [archs, bad] of [['70', '70'], ['90;sm_100', 'sm_100'], ['90a', '90a']]) {
    const { status, stderr } = build(['--cuda'], { ...process.env, REFIT_CUDA_ARCHS: archs })
    t.equal(status, 1)
    t.equal(
      stderr,
      `refit: REFIT_CUDA_ARCHS: expected compute capabilities of 80 or more, like "90" or "80;90;100;120", or "release"; got "${bad}"\n`
    )
  }
  t.end()
})

t.test('a lock that a dead process left behind is taken over', t => {
  const root = t.testdir({ scripts: {}, build: { 'native.lock': '999999999' } })
  mkdirSync(join(root, 'native'))
  writeFileSync(join(root, 'package.json'), '{"type":"module"}')
  copyScripts(root)
  const { stdout, stderr } = spawnSync(process.execPath, [join(root, 'scripts/build-native.js'), '--no-cmake'], {
    encoding: 'utf8',
    timeout: 120_000,
    env: { ...process.env, PATH: `${process.env.PATH ?? ''}${delimiter}.` }
  })
  t.notMatch(stdout, 'waiting')
  t.match(stderr, /ENOENT|is not installed/, 'it went on to the build itself')
  t.end()
})
