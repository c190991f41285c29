import type { OptionTable } from '../option.ts'

/** Options of the server: address, keys, limits. */
export const SERVER_OPTIONS = {
  host: {
    type: 'string',
    default: '127.0.0.1',
    group: 'server',
    help: 'Address to listen on. An address that others can reach needs --api-key, --admin-api-key or --insecure.'
  },
  port: {
    type: 'integer',
    default: 30000,
    min: 0,
    max: 65535,
    group: 'server',
    help: 'Port to listen on; 0 picks a free one.'
  },
  apiKey: {
    type: 'string',
    default: null,
    group: 'server',
    secret: true,
    value: 'KEY',
    help: 'Key that clients send as "Authorization: Bearer KEY". Other users of the machine can see flags: prefer ' +
      'the variable.',
    unset: 'no key is required'
  },
  adminApiKey: {
    type: 'string',
    default: null,
    group: 'server',
    secret: true,
    value: 'KEY',
    help: 'Key for the routes that change weights or the state of the engine.',
    unset: 'the same as --api-key'
  },
  insecure: {
    type: 'boolean',
    default: false,
    group: 'server',
    help: 'Listen on an address that others can reach without any key.'
  },
  allowMaster: {
    type: 'list',
    default: [],
    group: 'server',
    value: 'ADDRESS',
    takes: 'an address, a network such as 100.64.0.0/10, a name, *.name or *',
    help: "A trainer's store (master_address) where process groups may join, besides loopback and private " +
      'addresses. Link-local and metadata addresses are always refused. May be repeated.',
    unset: 'loopback and private addresses'
  },
  dialects: {
    type: 'list',
    default: [],
    group: 'server',
    value: 'NAMES',
    separator: ',',
    takes: 'names of dialects',
    help: 'The dialects whose routes are served, besides those of SGLang, OpenAI and refit. May be repeated.',
    unset: 'all'
  },
  uploadFolder: {
    type: 'string',
    default: null,
    group: 'server',
    value: 'FOLDER',
    help: 'Folder for uploads of weights that do not fit in memory, until they are written. Needs room for the ' +
      'largest; a folder in memory (tmpfs) uses that memory.',
    unset: "the system's folder for temporary files"
  },
  uploadTimeout: {
    type: 'number',
    default: 60,
    min: 1,
    max: 86400,
    group: 'server',
    value: 'SECONDS',
    help: 'Longest time that a client may send nothing during an upload of weights; then the upload is refused.'
  },
  shutdownTimeout: {
    type: 'number',
    default: 10,
    min: 0,
    max: 3600,
    group: 'server',
    value: 'SECONDS',
    help: 'Time for running requests to continue after Ctrl-C or SIGTERM, before they are aborted.'
  },
  logLevel: {
    type: 'choice',
    default: 'info',
    choices: ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'],
    spellings: { warning: 'warn', critical: 'fatal' },
    group: 'server',
    help: 'Least severe level that is logged.'
  },
  config: {
    type: 'string',
    default: null,
    group: 'server',
    value: 'FILE',
    help: 'JSON file with options, keyed by their names here without the dashes in front.',
    unset: 'none'
  }
} as const satisfies OptionTable
