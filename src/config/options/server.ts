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
  allowedHost: {
    type: 'list',
    default: [],
    group: 'server',
    value: 'NAME',
    takes: 'a host name without port, or *',
    help: 'A name of this server in the Host and Origin headers of requests that need no key; loopback names, IP ' +
      "addresses and the machine's name are always accepted. May be repeated; * accepts all (docs/security.md).",
    unset: 'on a loopback address no other name is accepted, elsewhere only pages of browsers are refused'
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
  metricNames: {
    type: 'list',
    default: [],
    group: 'server',
    value: 'NAMES',
    separator: ',',
    choices: ['refit', 'vllm', 'sglang'],
    takes: 'names out of refit, vllm, sglang',
    help: 'The servers under whose names /metrics reports: `refit:*`, `vllm:*`, `sglang:*`. May be repeated.',
    unset: 'all'
  },
  samplingDefaults: {
    type: 'choice',
    default: 'model',
    choices: ['model', 'openai'],
    spellings: { auto: 'model', vllm: 'openai' },
    aliases: ['generation-config'],
    group: 'server',
    help: 'Where /v1/completions and /v1/chat/completions take temperature, top_p, top_k, min_p and ' +
      "repetition_penalty from that a request leaves out: the model's generation_config.json, or OpenAI's defaults. " +
      'auto and vllm, the values of vLLM, mean these two.'
  },
  versionWait: {
    type: 'number',
    default: 30,
    min: 0,
    max: 86400,
    group: 'server',
    value: 'SECONDS',
    help: 'Longest time that a request waits for the weight version that it is bound to; then it is refused with 409.'
  },
  maxBodyBytes: {
    type: 'integer',
    default: 8 * 2 ** 20,
    min: 1024,
    max: 2 ** 29,
    group: 'server',
    value: 'BYTES',
    help: 'Longest body of a request that generates or reads text. Requests that change weights have limits of their ' +
      'own. The limit of values in one body (docs/security.md) is a fifth of it, at least 1677721.'
  },
  bodyMemory: {
    type: 'integer',
    default: null,
    min: 2 ** 20,
    max: 2 ** 50,
    group: 'server',
    value: 'BYTES',
    help: 'Most memory of the JSON bodies of all requests under way, and of what is parsed from them. Beyond it, ' +
      'requests are refused with 503.',
    unset: "a quarter of the limit of Node's heap"
  },
  maxRequestMemory: {
    type: 'integer',
    default: 2 ** 30,
    min: 2 ** 20,
    max: 2 ** 50,
    group: 'server',
    value: 'BYTES',
    help: 'Most memory that the results of one request could take: tokens, logprobs, sampling masks and routed ' +
      'experts of all its samples, at their longest. A request beyond it is refused before it is queued.'
  },
  samplesMemory: {
    type: 'integer',
    default: 16 * 2 ** 20,
    min: 0,
    max: 2 ** 40,
    group: 'server',
    value: 'BYTES',
    help: 'Memory of the last finished samples, for GET /samples/ID and POST /truth; 0 keeps none.'
  },
  keepSamples: {
    type: 'choice',
    default: 'asked',
    choices: ['asked', 'all'],
    group: 'server',
    help: 'The samples that are kept: of requests with "receipt": true, or all. Kept samples contain prompts.'
  },
  truthWarn: {
    type: 'number',
    default: null,
    min: 0,
    max: 1000,
    group: 'server',
    value: 'NATS',
    help:
      "Mean difference between a trainer's logprobs (POST /truth) and the engine's above which a warning is logged.",
    unset: 'nothing is logged'
  },
  ui: {
    type: 'boolean',
    default: true,
    group: 'server',
    help: 'Serve the page at /ui that shows updates, versions and load while they happen (docs/ui.md). Off: --no-ui.'
  },
  uiPrompts: {
    type: 'boolean',
    default: false,
    group: 'server',
    help: 'The page shows the prompts and outputs of running requests to whoever may generate.'
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
  otlpEndpoint: {
    type: 'string',
    default: null,
    group: 'server',
    value: 'URL',
    help:
      'OpenTelemetry collector to send traces and metrics to, such as http://127.0.0.1:4318. The OTEL_* variables ' +
      'are read, too (docs/telemetry.md).',
    unset: 'off, unless OTEL_EXPORTER_OTLP_ENDPOINT is set'
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
