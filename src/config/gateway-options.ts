import { OPTIONS } from './schema.ts'
import type { Option, OptionValue } from './option.ts'

const { host, port, apiKey, adminApiKey, insecure, ui, maxBodyBytes, bodyMemory } = OPTIONS
const { allowedHost, otlpEndpoint, logLevel, config } = OPTIONS

/** The options of `refit gateway`. Those of its own address are the server's. */
export const GATEWAY_OPTIONS = {
  engine: {
    type: 'list',
    default: [],
    group: 'gateway',
    value: 'URL',
    takes:
      '`http://host:port`, `https://host:port` or `unix:/path/to.sock`; several in the variable with `,` between them',
    separator: ',',
    help:
      'An engine: refit, SGLang or vLLM. May be given several times; POST /workers adds more. The first engine that ' +
      'answers has the current weights.',
    unset: 'none'
  },
  engineApiKey: {
    type: 'string',
    default: null,
    group: 'gateway',
    secret: true,
    value: 'KEY',
    help: 'API key that engines are called with.',
    unset: 'the key of each request goes on to its engine'
  },
  engineAdminApiKey: {
    type: 'string',
    default: null,
    group: 'gateway',
    secret: true,
    value: 'KEY',
    help: 'The same for the routes that change weights or the state of an engine.',
    unset: 'the same as --engine-api-key'
  },
  engineWait: {
    type: 'number',
    default: 30,
    min: 0,
    max: 86400,
    group: 'gateway',
    value: 'SECONDS',
    help:
      'Longest time that a request waits while no engine takes requests but one that is alive may soon: memory is ' +
      'released, weights are torn or are being compared. Then it is refused with 503.'
  },
  healthInterval: {
    type: 'number',
    default: 2,
    min: 0.05,
    max: 3600,
    group: 'gateway',
    value: 'SECONDS',
    help: 'From one look at an engine to the next.'
  },
  fill: {
    type: 'boolean',
    default: true,
    group: 'gateway',
    help:
      'Engines that join or come back with other weights load the current ones from another engine. Off (--no-fill): ' +
      'they wait for the next update.'
  },
  fillTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'gateway',
    value: 'SECONDS',
    help: 'Longest time that an engine may take to load the current weights from another one. After a failure it is ' +
      'tried again, each time later.'
  },
  host,
  port: { ...port, default: 30080 },
  apiKey,
  adminApiKey,
  insecure,
  ui,
  maxBodyBytes,
  bodyMemory,
  allowedHost,
  otlpEndpoint,
  logLevel,
  config
} as const satisfies Record<string, Option>

export type GatewayConfig = { readonly [K in keyof typeof GATEWAY_OPTIONS]: OptionValue<typeof GATEWAY_OPTIONS[K]> }
