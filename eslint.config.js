import imports from 'eslint-plugin-import'
import neostandard, { plugins } from 'neostandard'

// dprint formats the code (npm run format). These rules check the direction of imports, lengths and correctness.

/**
 * The folders that a folder may import from, types included. All others are refused, so imports point one way:
 * app -> routes -> dialects, gateway -> http -> updates -> engine, sources -> weights -> wire, model, text -> contract
 * -> native.
 */
export const LAYERS = {
  'src/contract': ['src/native'],
  'src/native': [],
  'src/config': ['src/contract'],
  'src/text': [],
  // Which tokens may follow a text, for a request with a grammar.
  'src/grammars': ['src/contract', 'src/native', 'src/text'],
  'src/model': ['src/native'],
  'src/wire': ['src/contract', 'src/native'],
  'src/rendezvous': ['src/wire'],
  'src/client': ['src/contract'],
  'src/weights': ['src/contract', 'src/model', 'src/native'],
  // LoRA adapters: their formats, versions and slots.
  'src/adapters': ['src/contract', 'src/model', 'src/native', 'src/weights'],
  'src/process-groups': ['src/contract', 'src/native', 'src/rendezvous'],
  // A trainer's shards: what it announces, and the plan of what each of its ranks sends to each rank of the engine.
  'src/shards': ['src/contract', 'src/model', 'src/native', 'src/weights'],
  'src/remote': ['src/client', 'src/contract', 'src/native', 'src/wire'],
  'src/sources': ['src/contract', 'src/native', 'src/process-groups', 'src/shards', 'src/wire'],
  // Checkpoints on this host that follow what a trainer publishes: an update loads them as it loads any folder.
  'src/deltas': ['src/native', 'src/sources', 'src/weights', 'src/wire'],
  'src/engine': ['src/adapters', 'src/contract', 'src/grammars', 'src/model', 'src/native', 'src/text', 'src/weights'],
  'src/peer': [
    'src/client',
    'src/contract',
    'src/engine',
    'src/model',
    'src/native',
    'src/process-groups',
    'src/remote',
    'src/rendezvous',
    'src/weights'
  ],
  'src/updates': ['src/contract', 'src/peer', 'src/process-groups', 'src/shards', 'src/sources', 'src/weights'],
  'src/http': [
    'src/contract',
    'src/deltas',
    'src/engine',
    'src/native',
    'src/peer',
    'src/process-groups',
    'src/shards',
    'src/sources',
    'src/text',
    'src/updates',
    'src/weights'
  ],
  // The only folder that knows OpenTelemetry; telemetry.ts alone is loaded at the start.
  'src/telemetry': ['src/contract', 'src/http'],
  'src/gateway': ['src/http', 'src/remote'],
  // The page, and the events that it follows.
  'src/ui': ['src/contract', 'src/gateway', 'src/http', 'src/updates'],
  // The meaning of requests of one trainer or server.
  'src/dialects': [
    'src/contract',
    'src/deltas',
    'src/gateway',
    'src/http',
    'src/native',
    'src/process-groups',
    'src/rendezvous',
    'src/sources',
    'src/text',
    'src/updates',
    'src/weights',
    'src/wire'
  ],
  // The load program and the terminal chat know servers by their routes alone, too.
  'src/load': ['src/client'],
  'src/report': ['src/client'],
  'src/chat': ['src/client'],
  // The conformance suite knows servers by their routes alone: no part of refit's engine or server.
  'src/conformance': ['src/native', 'src/rendezvous', 'src/wire'],
  routes: [
    'src/contract',
    'src/dialects',
    'src/gateway',
    'src/http',
    'src/shards',
    'src/ui',
    'src/updates',
    'src/weights'
  ],
  'src/app': '*',
  // `refit replay`: generates a sample again, and compares.
  'src/replay': ['src/client', 'src/http'],
  'src/cli': [
    'src/app',
    'src/chat',
    'src/client',
    'src/config',
    'src/conformance',
    'src/contract',
    'src/engine',
    'src/load',
    'src/native',
    'src/replay',
    'src/report',
    'src/telemetry',
    'src/text'
  ]
}
/** Files beside the folders, and the folders that may import them. */
export const FILES = {
  'src/index.ts': [],
  'src/main.ts': []
}
const NO_IO = [
  'fs',
  'fs/promises',
  'net',
  'dgram',
  'http',
  'https',
  'http2',
  'tls',
  'child_process',
  'worker_threads',
  'cluster',
  'dns'
]

/** The names of a browser that the page uses. */
const BROWSER = [
  'devicePixelRatio',
  'document',
  'getComputedStyle',
  'localStorage',
  'matchMedia',
  'requestAnimationFrame',
  'ResizeObserver',
  'sessionStorage',
  'window'
]

const zones = Object.entries(LAYERS).flatMap(([folder, allowed]) => [
  ...Object
    .keys(LAYERS)
    .filter(other => other !== folder && allowed !== '*' && !allowed.includes(other))
    .map(other => ({ target: `./${folder}`, from: `./${other}`, message: `${folder} does not import from ${other}.` })),
  ...Object
    .entries(FILES)
    .filter(([, by]) => !by.includes(folder))
    .map(([file]) => ({ target: `./${folder}`, from: `./${file}`, message: `${folder} does not import ${file}.` }))
])

export default [
  ...neostandard({
    ts: true,
    noStyle: true,
    ignores: ['build/**', 'dist/**', 'prebuilds/**', 'coverage/**', 'node_modules/**', '.tap/**']
  }),
  {
    files: ['src/**/*.ts', 'routes/**/*.ts'],
    plugins: { import: imports },
    rules: {
      'import/no-restricted-paths': ['error', { basePath: import.meta.dirname, zones }],
      'max-lines-per-function': ['error', { max: 80 }]
    }
  },
  {
    files: ['src/wire/**/*.ts'],
    rules: {
      'no-restricted-imports': ['error', {
        patterns: [{ regex: `^(node:)?(${NO_IO.join('|')})$`, message: 'src/wire opens no file and no socket.' }]
      }]
    }
  },
  {
    plugins: { '@stylistic': plugins['@stylistic'] },
    rules: {
      '@stylistic/max-len': ['error', { code: 120, ignoreUrls: true, ignoreRegExpLiterals: true }],
      'max-lines': ['error', { max: 400 }]
    }
  },
  {
    files: ['ui/**/*.js'],
    languageOptions: { globals: Object.fromEntries(BROWSER.map(name => [name, 'readonly'])) }
  },
  {
    files: ['**/*.ts'],
    rules: {
      '@typescript-eslint/consistent-type-imports': ['error', { fixStyle: 'separate-type-imports' }],
      // A schema and its type may share a name, and tsc finds real redeclarations.
      '@typescript-eslint/no-redeclare': 'off',
      'valid-typeof': 'off',
      'no-void': ['error', { allowAsStatement: true }]
    }
  }
]
