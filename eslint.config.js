import neostandard from 'neostandard'

// Who may import whom, as the design has it. Types cross more borders than values do: they hold nothing together at run time.
const FOLDERS = ['routes', 'src/weights', 'src/sources', 'src/pulls', 'src/engine', 'src/text', 'src/model', 'src/wire', 'src/store', 'src/groups', 'src/transfer', 'src/http', 'src/config', 'src/cli', 'src/remote', 'src/gateway', 'src/dialects']
const MAY_IMPORT = {
  routes: ['src/weights', 'src/engine', 'src/http', 'src/text', 'src/dialects'],
  'src/http': ['src/engine', 'src/weights', 'src/text'],
  'src/weights': ['src/sources', 'src/model'],
  'src/sources': ['src/wire', 'src/model', 'src/groups'],
  // Checkpoints on this host that follow what is published: they announce no tensors, and an update loads them as any folder.
  'src/pulls': ['src/sources', 'src/wire'],
  'src/engine': ['src/model', 'src/text', 'src/weights'],
  'src/text': [],
  'src/model': [],
  'src/wire': [],
  'src/store': ['src/wire'],
  'src/groups': ['src/store'],
  'src/transfer': ['src/groups', 'src/store', 'src/weights', 'src/model', 'src/remote'],
  'src/config': [],
  'src/remote': ['src/engine', 'src/weights', 'src/wire'],
  // What a trainer's own requests mean, over what every dialect uses.
  'src/dialects': ['src/http', 'src/weights', 'src/sources', 'src/pulls', 'src/engine', 'src/groups', 'src/store', 'src/wire'],
  'src/gateway': ['src/remote', 'src/http'],
  'src/cli': ['src/engine', 'src/text', 'src/config', 'src/dialects']
}
/** Files beside the folders that only some may see. */
const FILES = {
  'src/native/addon.ts': ['src/weights', 'src/sources', 'src/pulls', 'src/engine', 'src/transfer'],
  'src/app/plugin.ts': [],
  'src/app/server.ts': ['src/cli'],
  'src/app/gateway-server.ts': ['src/cli'],
  'src/main.ts': [],
  'src/config.ts': ['src/config', 'src/cli']
}
const NO_IO = ['fs', 'fs/promises', 'net', 'dgram', 'http', 'https', 'http2', 'tls', 'child_process', 'worker_threads', 'cluster', 'dns']

const directions = Object.entries(MAY_IMPORT).map(([folder, allowed]) => ({
  files: [`${folder}/**/*.ts`],
  rules: {
    '@typescript-eslint/no-restricted-imports': ['error', {
      patterns: [
        ...FOLDERS.filter(other => other !== folder && !allowed.includes(other)).map(other => ({
          regex: `^\\.{1,2}/(.*/)?${other.replace('src/', '')}/`, allowTypeImports: true, message: `${folder} does not import from ${other}.`
        })),
        ...Object.entries(FILES).filter(([, by]) => !by.includes(folder)).map(([file]) => ({
          regex: `^(\\.\\./)+(src/)?${file.replace('src/', '').replace('.', '\\.')}$`, allowTypeImports: true, message: `${folder} does not import ${file}.`
        })),
        ...folder === 'src/wire' ? [{ regex: `^(node:)?(${NO_IO.join('|')})$`, message: 'src/wire opens no file and no socket.' }] : []
      ]
    }]
  }
}))

const ONLY_SERVER_SEES_ROUTES = {
  files: ['src/*.ts'],
  ignores: ['src/app/plugin.ts', 'src/app/server.ts', 'src/app/gateway-server.ts'],
  rules: {
    '@typescript-eslint/no-restricted-imports': ['error', { patterns: [{ regex: '/routes/', allowTypeImports: true, message: 'Only src/app/plugin.ts and src/app/server.ts see routes.' }] }]
  }
}

export default [
  ...neostandard({ ts: true, ignores: ['build/**', 'dist/**', 'prebuilds/**', 'coverage/**', 'node_modules/**', '.tap/**'] }),
  ...directions,
  ONLY_SERVER_SEES_ROUTES,
  {
    files: ['**/*.ts'],
    rules: {
      '@typescript-eslint/consistent-type-imports': ['error', { fixStyle: 'separate-type-imports' }],
      // A schema and its type may share a name, and tsc finds real redeclarations.
      '@typescript-eslint/no-redeclare': 'off',
      'valid-typeof': 'off',
      'no-void': ['error', { allowAsStatement: true }],
      '@stylistic/object-property-newline': 'off',
      '@stylistic/member-delimiter-style': ['error', { multiline: { delimiter: 'none' }, singleline: { delimiter: 'comma' } }]
    }
  }
]
