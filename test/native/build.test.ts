import { spawnSync } from 'node:child_process'
import { chmodSync, cpSync, existsSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'

const SCRIPT = 'scripts/build-native.js'
/** A tree without sources keeps only what the build script itself consists of. */
const CMAKE_FILES = ['native/CMakeLists.txt', 'native/addon.cmake', 'native/cpu/sources.cmake']
const TEST_FILES = ['native/test/tests.cmake', 'native/standard_headers.cmake', 'native/standard_headers.h']
const BUILD_FILES = [SCRIPT, 'scripts/native', ...CMAKE_FILES]

interface Result {
  status: number | null
  stdout: string
  stderr: string
}

function build (args: string[], env: NodeJS.ProcessEnv = process.env, root = packageRoot): Result {
  return spawnSync(process.execPath, [join(root, SCRIPT), ...args], { encoding: 'utf8', env, timeout: 240_000 })
}

/** A PATH on which only these programs are found, each made from a shell script. */
function pathWith (t: Test, programs: Record<string, string>): NodeJS.ProcessEnv {
  const folder = t.testdir()
  for (const [name, body] of Object.entries(programs)) {
    writeFileSync(join(folder, name), `#!/bin/sh\n${body}\n`)
    chmodSync(join(folder, name), 0o755)
  }
  return { PATH: folder }
}

const GCC = 'case "$1" in --version) echo "g++ (GCC) 12.2.0";; *) echo 12.2.0;; esac'

t.test('without a compiler the error names what to install', t => {
  const { status, stderr } = build([], pathWith(t, {}))
  t.equal(status, 1)
  t.equal(
    stderr,
    'refit: no C++ compiler found (looked for g++, c++, clang++): install g++ >= 11 ' +
      '(on Debian or Ubuntu: apt-get install -y cmake g++)\n'
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

t.test('without cmake, or with an old one, the error names what to install', t => {
  const missing = build([], pathWith(t, { 'g++': GCC }))
  t.equal(missing.status, 1)
  t.equal(
    missing.stderr,
    'refit: cmake was not found: install cmake >= 3.18 (on Debian or Ubuntu: apt-get install -y cmake g++)\n'
  )
  const old = build([], pathWith(t, { 'g++': GCC, cmake: 'echo "cmake version 3.10.2"' }))
  t.equal(old.status, 1)
  t.match(old.stderr, /^refit: cmake is version 3\.10\.2, but refit needs cmake >= 3\.18: install a newer one/)
  t.end()
})

t.test('with cmake but neither make nor ninja, the error names what to install', t => {
  const { status, stderr } = build([], pathWith(t, { 'g++': GCC, cmake: 'echo "cmake version 3.25.1"' }))
  t.equal(status, 1)
  t.equal(
    stderr,
    'refit: cmake needs make or ninja: install one (on Debian or Ubuntu: apt-get install -y make)\n'
  )
  t.end()
})

t.test('another platform is refused, and the message names it', t => {
  for (const [platform, arch] of [['darwin', 'arm64'], ['win32', 'x64'], ['linux', 'ia32']]) {
    const pretend = join(t.testdir(), 'pretend.cjs')
    writeFileSync(
      pretend,
      `Object.defineProperty(process, 'platform', { value: '${platform}' })\n` +
        `Object.defineProperty(process, 'arch', { value: '${arch}' })`
    )
    const { status, stderr } = spawnSync(process.execPath, ['--require', pretend, join(packageRoot, SCRIPT)], {
      encoding: 'utf8'
    })
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

/** A small tree with the folders of the real one, which takes minutes to compile. */
function smallTree (t: Test): { root: string, write: (file: string, text: string) => void } {
  const root = t.testdir({ native: { core: {}, cpu: {}, codec: {}, transport: {}, binding: {} }, scripts: {} })
  const write = (file: string, text: string): void => {
    writeFileSync(join(root, file), text)
  }
  write('package.json', '{"type":"module"}')
  for (const file of [...BUILD_FILES, 'native/binding/exports.map', 'native/core/fault.h']) {
    cpSync(join(packageRoot, file), join(root, file), { recursive: true })
  }
  symlinkSync(join(packageRoot, 'node_modules'), join(root, 'node_modules'))
  write('native/core/answer.h', '#pragma once\n#define ANSWER "one"\n')
  write('native/core/answer.cc', '#include "core/answer.h"\nconst char* answer() { return ANSWER; }\n')
  write('native/cpu/other_avx512.cc', '#if defined(__x86_64__) && !defined(__AVX512F__)\n#error flags\n#endif\n')
  write('native/cpu/other_scalar.cc', 'int scalar_symbol;\n')
  write('native/transport/none.cc', 'int unused_symbol;\n')
  write('native/binding/control.cc', '#include "core/fault.h"\nbool is_armed() { return REFIT_FAULT(kRead); }\n')
  write('native/core/fault.cc', '#include "core/fault.h"\nbool has_fault() { return REFIT_FAULT(kRead); }\n')
  // The C interface compiles in a tenth of the time of napi.h.
  write('native/binding/napi_setup.h', '#pragma once\n#include <node_api.h>\n')
  write(
    'native/binding/addon.cc',
    '#include "binding/napi_setup.h"\n' +
      'const char* answer();\n' +
      'napi_value isas(napi_env env, napi_callback_info) {\n' +
      '  napi_value text;\n' +
      '  napi_create_string_utf8(env, answer(), NAPI_AUTO_LENGTH, &text);\n' +
      '  return text;\n' +
      '}\n' +
      'NAPI_MODULE_INIT() {\n' +
      '  napi_value function;\n' +
      '  napi_create_function(env, "isas", NAPI_AUTO_LENGTH, isas, nullptr, &function);\n' +
      '  napi_set_named_property(env, exports, "isas", function);\n' +
      '  return exports;\n' +
      '}\n'
  )
  return { root, write }
}

t.test('the build keeps fresh objects, and compiles again those with a changed header', { timeout: 300_000 }, t => {
  const { root, write } = smallTree(t)
  const env = { ...process.env, REFIT_CUDA: '0' }
  const run = (): string => {
    const { status, stdout, stderr } = build([], env, root)
    t.equal(status, 0, stderr)
    return stdout
  }
  const built = join(root, `prebuilds/linux-${process.arch}/refit.node`)
  const answer = (): string =>
    spawnSync(process.execPath, ['-p', `require(${JSON.stringify(built)}).isas()`], { encoding: 'utf8' }).stdout.trim()
  t.match(run(), /^refit: prebuilds\/linux-\w+\/refit.node built in [\d.]+ s\n$/)
  t.equal(answer(), 'one')
  t.match(run(), /is up to date/)
  write('native/core/answer.h', '#pragma once\n#define ANSWER "two"\n')
  t.match(run(), /built in/)
  t.equal(answer(), 'two')

  write('native/core/answer.cc', 'const char* answer() { return 1; }\n')
  const broken = build([], env, root)
  t.equal(broken.status, 1)
  t.match(broken.stderr, /native\/core\/answer.cc:1:.*error:[^]*cmake failed \(exit \d+\)\n$/)
  t.equal(answer(), 'two', 'a failed build leaves the last binary in place')
  t.notOk(existsSync(join(root, 'build/native.lock')))

  // A source in a folder below is found, and may not hide a fault point behind a header that CMake does not see.
  write('native/core/answer.cc', 'const char* answer();\n')
  mkdirSync(join(root, 'native/core/deeper'))
  write('native/core/deeper/hidden.h', '#include "core/fault.h"\n')
  write('native/core/deeper/through.h', '#include "core/deeper/hidden.h"\n')
  write('native/core/deeper/answer.cc', '#include "core/deeper/through.h"\nconst char* answer() { return "three"; }\n')
  const hidden = build([], env, root)
  t.equal(hidden.status, 1)
  t.match(hidden.stderr, 'include core/fault.h in the source')
  write('native/core/deeper/answer.cc', '#include "core/deeper/hidden.h"\nconst char* answer() { return "three"; }\n')
  t.match(run(), /built in/)
  t.equal(answer(), 'three')
  t.end()
})

t.test('REFIT_CUDA decides whether the CUDA library is built', { timeout: 300_000 }, t => {
  const { root, write } = smallTree(t)
  mkdirSync(join(root, 'native/cuda'))
  write('native/cuda/CMakeLists.txt', 'message(FATAL_ERROR "no sources")\n')
  const cuda = (wanted: string | undefined): Result => build([], { ...process.env, REFIT_CUDA: wanted }, root)
  const never = cuda('0')
  t.equal(never.status, 0, never.stderr)
  t.match(never.stdout, /\nrefit: no CUDA library: REFIT_CUDA=0\n$/)
  const wrong = cuda('yes')
  t.equal(wrong.status, 1)
  t.equal(wrong.stderr, 'refit: REFIT_CUDA: expected 1 or 0, got "yes"\n')
  const left = cuda(undefined)
  t.equal(left.status, 0, left.stderr)
  if (existsSync('/dev/nvidiactl')) t.match(left.stderr + left.stdout, /the CPU engine was|there is no nvcc/)
  else {
    t.match(
      left.stdout,
      /\nrefit: no CUDA library: there is no NVIDIA GPU here \(REFIT_CUDA=1 insists on building it\)\n$/
    )
  }
  const required = cuda('1')
  t.equal(required.status, 1)
  t.match(required.stderr, /^refit: (the CUDA library needs nvcc|[^]*no sources[^]*cmake failed)/)
  t.end()
})

t.test('compute capabilities that refit has no kernels for are refused', {
  skip: !['nvcc', '/usr/local/cuda/bin/nvcc'].some(nvcc => spawnSync(nvcc, ['--version']).status === 0) && 'no nvcc'
}, t => {
  for (const [archs, bad] of [['70', '70'], ['90;sm_100', 'sm_100'], ['90a', '90a']]) {
    const { status, stderr } = build(['--cuda'], { ...process.env, REFIT_CUDA_ARCHS: archs })
    t.equal(status, 1)
    t.equal(
      stderr,
      'refit: REFIT_CUDA_ARCHS: expected compute capabilities of 80 or more, like "90" or "80;90;100;120", ' +
        `or "release"; got "${bad}"\n`
    )
  }
  t.end()
})

t.test('a build replaces the lock of a dead process', t => {
  const root = t.testdir({ build: { 'native.lock': '999999999' } })
  writeFileSync(join(root, 'package.json'), '{"type":"module"}')
  for (const file of [SCRIPT, 'scripts/native']) cpSync(join(packageRoot, file), join(root, file), { recursive: true })
  const { status, stdout, stderr } = build([], process.env, root)
  t.equal(status, 1)
  t.notMatch(stdout, 'waiting')
  t.match(stderr, /cmake failed/, 'it went on to the build itself')
  t.notOk(existsSync(join(root, 'build/native.lock')))
  t.end()
})

t.test('every native test program is built, in whichever folder its source lies', t => {
  const { root, write } = smallTree(t)
  for (const file of TEST_FILES) cpSync(join(packageRoot, file), join(root, file), { recursive: true })
  mkdirSync(join(root, 'native/cuda/group'), { recursive: true })
  write('native/cuda/group/group.cc', 'int group;\n')
  mkdirSync(join(root, 'native/test/deeper/still'), { recursive: true })
  write('native/test/nccl_loop.cc', 'int loop;\n')
  write('native/test/deeper/group_life.cc', 'int main() { return 0; }\n')
  write('native/test/first_test.cc', 'int main() { return 0; }\n')
  write('native/test/deeper/still/second_test.cc', 'int main() { return 3; }\n')
  const { status, stdout, stderr } = build(['--tests'], process.env, root)
  t.equal(status, 1)
  t.match(stdout, /first_test \.+ +Passed/)
  t.match(stdout, /second_test \.+\**Failed/)
  t.match(stdout, /group_life \.+ +Passed/)
  t.match(stderr, /native tests failed/)
  write('native/test/deeper/still/second_test.cc', 'int main() { return 0; }\n')
  t.match(build(['--tests'], process.env, root).stdout, /100% tests passed(, 0 tests failed)? out of 3/)
  t.ok(readFileSync(join(root, 'build/native-tests/CMakeCache.txt'), 'utf8').includes('REFIT_SANITIZE:STRING=address'))
  t.end()
})
