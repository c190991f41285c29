import t from 'tap'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import fc from 'fast-check'
import { OPTIONS } from '../../src/config/schema.ts'
import type { OptionKey } from '../../src/config/schema.ts'
import { flagName, variableName } from '../../src/config/option.ts'
import type { Option } from '../../src/config/option.ts'
import { isLoopback, loadConfig } from '../../src/config/load-config.ts'
import { redact } from '../../src/config/redact.ts'

const refused = (param: string, message: RegExp): { code: string, param: string, message: RegExp } => ({
  code: 'CONFIG',
  param,
  message
})

t.test('options that are not set have their defaults', async t => {
  const { config, sources, warnings } = loadConfig([], {})
  t.match(config, {
    model: null,
    host: '127.0.0.1',
    port: 30000,
    tp: 1,
    device: 'cpu',
    dtype: 'auto',
    insecure: false,
    modelRoot: [],
    apiKey: null,
    weightVersion: 'default'
  })
  t.same(Object.keys(config).sort(), Object.keys(OPTIONS).sort())
  t.same(sources, {})
  t.same(warnings, [])
})

t.test('flags override the environment, which overrides the file, which overrides defaults', async t => {
  const file = join(t.testdir(), 'refit.json')
  writeFileSync(file, JSON.stringify({ port: 1, tp: 3, 'log-level': 'debug', 'max-running-requests': 7 }))
  const { config, sources } = loadConfig(['m', '--port', '3'], { REFIT_CONFIG: file, REFIT_PORT: '2', REFIT_TP: '2' })
  t.match(config, { model: 'm', port: 3, tp: 2, logLevel: 'debug', maxRunningRequests: 7, host: '127.0.0.1' })
  t.same(sources, {
    model: 'flag',
    port: 'flag',
    tp: 'environment',
    config: 'environment',
    logLevel: 'file',
    maxRunningRequests: 'file'
  })
})

t.test('every option can be set in all three places, with the same outcome', async t => {
  for (const [key, option] of Object.entries<Option>(OPTIONS)) {
    if (key === 'config') continue
    const sample = sampleOf(option)
    const name = flagName(key)
    const file = join(t.testdir(), 'refit.json')
    writeFileSync(file, JSON.stringify({ [name]: sample, insecure: true }))
    const text = String(sample)
    const flags = option.type === 'boolean' ? [`--${name}=${text}`] : [`--${name}`, text]
    const expected = option.type === 'list' ? [sample] : sample
    for (const spelling of option.aliases ?? []) {
      t.same(loadConfig([`--${spelling}=${text}`], {}).config[key as OptionKey], expected, `--${spelling}`)
    }
    t.same(loadConfig([...flags, '--insecure'], {}).config[key as OptionKey], expected, `--${name}`)
    t.same(
      loadConfig(['--insecure'], { [variableName(key)]: text }).config[key as OptionKey],
      expected,
      variableName(key)
    )
    t.same(loadConfig([], { REFIT_CONFIG: file }).config[key as OptionKey], expected, `key ${name}`)
  }
})

t.test("SGLang's names of options are accepted", async t => {
  const { config } = loadConfig([
    '--model-path',
    'x',
    '--tp-size',
    '2',
    '--mem-fraction-static',
    '.5',
    '--chunked-prefill-size',
    '512',
    '--dtype',
    'BF16'
  ], {})
  t.match(config, { model: 'x', tp: 2, memFraction: 0.5, maxPrefillTokens: 512, dtype: 'bfloat16' })
  t.equal(loadConfig(['--tensor-parallel-size=4'], {}).config.tp, 4)
})

t.test('a device is a name with or without a number, in upper or lower case', async t => {
  for (
    const [typed, meant] of [['cpu', 'cpu'], ['CPU', 'cpu'], ['cuda', 'cuda'], ['CUDA:3', 'cuda:3'], [
      'gpu',
      'cuda'
    ]] as const
  ) {
    t.equal(loadConfig(['--device', typed], {}).config.device, meant)
    t.equal(loadConfig([], { REFIT_DEVICE: typed }).config.device, meant)
  }
  t.same(
    loadConfig([], {
      REFIT_CUDA_LIBRARY: '/x',
      REFIT_CUDA_LIBS: '/y',
      REFIT_CUDA_ARCHS: '90',
      REFIT_WATCHDOG_SECONDS: '5'
    })
      .warnings,
    []
  )
})

t.test('the model is an argument in any position or a flag, and two different models are refused', async t => {
  t.equal(loadConfig(['--port', '1', 'org/name', '--insecure'], {}).config.model, 'org/name')
  t.equal(loadConfig(['--', '--odd-name'], {}).config.model, '--odd-name')
  t.equal(loadConfig(['same', '--model', 'same'], {}).config.model, 'same')
  t.throws(() => loadConfig(['a', '--model', 'b'], {}), refused('MODEL', /given twice/))
  t.throws(() => loadConfig(['a', 'b'], {}), refused('MODEL', /got "a" and "b"/))
  t.throws(() => loadConfig([''], {}), refused('MODEL', /got ""/))
})

t.test('a later flag replaces an earlier one, and a list grows', async t => {
  t.equal(loadConfig(['--port', '1', '--port', '2'], {}).config.port, 2)
  t.same(loadConfig(['--model-root', 'a', '--model-root=b'], {}).config.modelRoot, ['a', 'b'])
  t.same(loadConfig([], { REFIT_MODEL_ROOT: '/a::/b:' }).config.modelRoot, ['/a', '/b'])
  t.throws(() => loadConfig(['--model-root='], {}), refused('--model-root', /list of paths, got \[""\]/))
})

t.test('switches accept --x, --no-x, --x=false and the usual words in environment variables', async t => {
  t.equal(loadConfig(['--insecure'], {}).config.insecure, true)
  t.equal(loadConfig(['--insecure=0'], {}).config.insecure, false)
  t.equal(loadConfig(['--no-insecure'], { REFIT_INSECURE: 'true' }).config.insecure, false)
  for (
    const [text, value] of [
      ['1', true],
      ['TRUE', true],
      ['yes', true],
      ['On', true],
      ['0', false],
      ['no', false],
      ['off', false],
      ['false', false],
      ['', false]
    ] as const
  ) {
    t.equal(loadConfig([], { REFIT_INSECURE: text }).config.insecure, value, text)
  }
  t.throws(
    () => loadConfig([], { REFIT_INSECURE: 'maybe' }),
    refused('REFIT_INSECURE', /expected true, 1, yes or on, or false, 0, no or off, got "maybe"/)
  )
  t.throws(() => loadConfig(['--no-port'], {}), refused('--no-port', /unknown option/))
})

t.test('an error for a misspelled option suggests the right name', async t => {
  for (
    const [typed, meant] of [
      ['--prot', '--port'],
      ['--max-runing-requests', '--max-running-requests'],
      ['--tp_size', '--tp-size'],
      ['--Host', '--host'],
      ['-port', '--port'],
      ['--api-kye', '--api-key'],
      ['--moddel-root=x', '--model-root']
    ] as const
  ) {
    t.throws(
      () => loadConfig([typed, '1'], {}),
      refused(typed.split('=')[0]!, new RegExp(`unknown option; did you mean ${meant}\\?$`)),
      typed
    )
  }
  t.throws(
    () => loadConfig(['--enable-torch-compile'], {}),
    refused('--enable-torch-compile', /unknown option; "refit serve --help" lists them all/)
  )
})

t.test('a flag without its value is refused, and a negative number counts as a value', async t => {
  t.throws(() => loadConfig(['--port'], {}), refused('--port', /needs a value/))
  t.throws(() => loadConfig(['--port', '--host', 'x'], {}), refused('--port', /needs a value/))
  t.throws(() => loadConfig(['--port', '-1'], {}), refused('--port', /from 0 to 65535, got -1/))
})

t.test('errors for wrong types and ranges name the expected and the given value', async t => {
  const cases: [string[], string, RegExp][] = [
    [['--port', 'abc'], '--port', /expected an integer from 0 to 65535, got "abc"/],
    [['--port', '1.5'], '--port', /got 1.5/],
    [['--port', '65536'], '--port', /got 65536/],
    [['--port', '0x10'], '--port', /got "0x10"/],
    [['--port', ''], '--port', /got ""/],
    [['--tp', '1e999'], '--tp', /expected an integer from 1 to 64/],
    [['--mem-fraction', 'NaN'], '--mem-fraction', /a number from 0.01 to 0.95, got "NaN"/],
    [['--host', ''], '--host', /a string that is not empty, got ""/],
    [
      ['--dtype', 'bfloat61'],
      '--dtype',
      /one of auto, bfloat16, float16, float32, got "bfloat61"; did you mean bfloat16\?/
    ],
    [['--device', 'tpu'], '--device', /expected cpu, cuda or cuda:N, got "tpu"/],
    [['--device', 'cuda:'], '--device', /expected cpu, cuda or cuda:N, got "cuda:"/],
    [['--device', 'cuda:-1'], '--device', /got "cuda:-1"/],
    [['--device', 'cuda:0,1'], '--device', /got "cuda:0,1"/],
    [['--device', ''], '--device', /expected cpu, cuda or cuda:N, got ""/],
    [['--base-gpu-id', '-1'], '--base-gpu-id', /expected an integer from 0 to 1023, got -1/],
    [['--watchdog-timeout', '0'], '--watchdog-timeout', /from 1 to 86400, got 0/]
  ]
  for (const [args, param, message] of cases) {
    t.throws(
      () => loadConfig(args, {}),
      refused(param, message),
      args.join(' ')
    )
  }
})

t.test('an error about a variable that Kubernetes sets explains its origin', async t => {
  t.throws(() => loadConfig([], { REFIT_PORT: 'tcp://10.0.0.1:80' }), refused('REFIT_PORT', /Service named refit/))
  t.same(
    loadConfig([], { REFIT_SERVICE_HOST: '10.0.0.1', REFIT_PORT_30000_TCP_PROTO: 'tcp', REFIT_NATIVE: '/x' }).warnings,
    []
  )
  t.match(loadConfig([], { REFIT_MODEL_ROOTS: 'x' }).warnings, [
    /REFIT_MODEL_ROOTS is not a variable .* did you mean REFIT_MODEL_ROOT\?/
  ])
})

t.test('the config file is checked as strictly as flags are', async t => {
  const dir = t.testdir()
  const load = (content: string): unknown => {
    const file = join(dir, 'refit.json')
    writeFileSync(file, content)
    return loadConfig(['--config', file], {}).config
  }
  t.match(load('{"max_running_requests": 5, "tp-size": 2, "model-root": "/a", "threads": null}'), {
    maxRunningRequests: 5,
    tp: 2,
    modelRoot: ['/a'],
    threads: null
  })
  t.throws(() => load('{"prot": 1}'), refused('prot', /unknown key "prot"; did you mean "port"\?/))
  t.throws(() => load('{"port": "1"}'), {
    code: 'CONFIG',
    message: /port: expected an integer from 0 to 65535, got "1"/
  })
  t.throws(() => load('{"insecure": "true"}'), { code: 'CONFIG', message: /expected true or false, got "true"/ })
  t.throws(() => load('{"tp": 1, "tp-size": 2}'), refused('tp-size', /another spelling/))
  t.throws(() => load('{"config": "x"}'), refused('config', /cannot name another one/))
  t.throws(() => load('{"__proto__": {"port": 1}}'), refused('__proto__', /unknown key/))
  t.throws(() => load('[1]'), refused('--config', /got an array/))
  t.throws(() => load('{'), refused('--config', /cannot be read as JSON/))
  t.throws(() => loadConfig(['--config', join(dir, 'none.json')], {}), refused('--config', /ENOENT/))
})

t.test('an address that others can reach requires a key or an explicit opt-out', async t => {
  for (const host of ['0.0.0.0', '::', '10.0.0.1', 'example.org', '127.evil.example', '::ffff:10.0.0.1', '1.127.0.0']) {
    t.notOk(isLoopback(host), host)
    t.throws(() => loadConfig(['--host', host], {}), refused('--host', /can be reached by others/), host)
    for (const cure of [['--insecure'], ['--api-key', 'k'], ['--admin-api-key', 'k']]) {
      t.equal(loadConfig(['--host', host, ...cure], {}).config.host, host)
    }
  }
  for (const host of ['127.0.0.1', '127.9.9.9', 'localhost', 'LOCALHOST', '::1', '[::1]', '::ffff:127.0.0.1']) {
    t.ok(isLoopback(host) && loadConfig(['--host', host], {}), host)
  }
})

t.test('keys are never shown: not in the logged configuration and not in errors', async t => {
  const { config } = loadConfig(['--api-key', 'hunter2', '--port', '8'], { REFIT_ADMIN_API_KEY: 'hunter3' })
  const shown = redact(config)
  t.match(shown, { 'api-key': '***', 'admin-api-key': '***', port: 8 })
  t.notMatch(JSON.stringify(shown), /hunter/)
  t.equal(redact(loadConfig([], {}).config)['api-key'], null)
  const file = join(t.testdir(), 'refit.json')
  writeFileSync(file, '{"api-key": ["hunter2"]}')
  t.throws(() => loadConfig(['--config', file], {}), { message: /got object \(not shown\)/ })
})

t.test('any command line gives a configuration or a CONFIG error', async t => {
  const word = fc.oneof(
    fc.string(),
    fc.constantFrom(
      ...Object.keys(OPTIONS).map(key => '--' + flagName(key)),
      '--',
      '-',
      '=',
      '--=',
      '--no-',
      '-x',
      '9',
      '--port='
    )
  )
  fc.assert(
    fc.property(fc.array(word, { maxLength: 6 }), args => {
      try {
        loadConfig(args, {})
        return true
      } catch (error) {
        return (error as { code?: string }).code === 'CONFIG'
      }
    }),
    { numRuns: 500 }
  )
})

function sampleOf (option: Option): string | number | boolean {
  switch (option.type) {
    case 'boolean':
      return true
    case 'integer':
      return Math.max(option.min ?? 0, 17)
    case 'number':
      return option.max! < 1 ? 0.25 : 2.5
    case 'choice':
      return option.choices!.at(-1)!
    case 'list':
      return option.choices?.at(-1) ?? '/a'
    case 'string':
      return option.pattern === undefined ? 'word' : 'cuda:17'
  }
}

t.test('a list of choices takes known names only', async t => {
  const load = (...args: string[]): readonly string[] => loadConfig(args, {}).config.metricNames
  t.same(load('--metric-names', 'refit,VLLM'), ['refit', 'vllm'])
  t.same(load('--metric-names', 'sglang', '--metric-names', 'refit'), ['sglang', 'refit'])
  t.throws(() => load('--metric-names', 'vlm'), {
    code: 'CONFIG',
    message: /^--metric-names: expected names out of refit, vllm, sglang, .*did you mean vllm\?$/
  })
})

t.test("SGLang's number of adapters counts the base model, and ours does not", async t => {
  const slots = (args: string[]): number => loadConfig(['m', ...args], {}).config.maxLoras
  t.equal(slots([]), 4)
  t.equal(slots(['--max-loras', '5']), 5)
  t.equal(slots(['--max-loras-per-batch', '5']), 4)
  t.equal(slots(['--max-loras-per-batch=2']), 1)
  t.throws(() => slots(['--max-loras-per-batch', '1']), {
    code: 'CONFIG',
    message: '--max-loras-per-batch: expected an integer of at least 2, got 1'
  })
})
