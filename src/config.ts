import type { Option, OptionValue } from './config/option.ts'
import { UPDATE_DEADLINE_SECONDS } from './contract/update-deadline.ts'

// The one table of options. Flags, environment variables, keys of the config file, defaults, types, `--help` and
// docs/configuration.md come from it. src/config/load-config.ts reads values by it.

export const OPTIONS = {
  model: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'MODEL',
    aliases: ['model-path'],
    help:
      'A folder with config.json and safetensors files, or a name (org/name) in the local Hugging Face cache. Also the first argument without a flag.',
    unset: 'required'
  },
  revision: {
    type: 'string',
    default: 'main',
    group: 'model',
    value: 'NAME',
    help: 'Branch, tag or commit of a model that is taken from the Hugging Face cache.'
  },
  servedModelName: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'NAME',
    help: 'Name of the model in replies and in /v1/models.',
    unset: 'MODEL as it was given'
  },
  tokenizerPath: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'PATH',
    help: 'Folder that holds tokenizer.json and tokenizer_config.json.',
    unset: "the model's folder"
  },
  skipTokenizerInit: {
    type: 'boolean',
    default: false,
    group: 'model',
    help: 'Serve token ids only: no tokenizer is loaded, text prompts are refused.'
  },
  weightVersion: {
    type: 'string',
    default: 'default',
    group: 'model',
    value: 'LABEL',
    help: 'Label of the weights that are loaded at start.'
  },
  loadFrom: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'URL',
    help:
      'Take the weights from a refit server that runs with this model, with their label, instead of from the folder of MODEL, which then needs only its configuration and tokenizer.',
    unset: 'from the folder of MODEL'
  },
  loadFromKey: {
    type: 'string',
    default: null,
    group: 'model',
    secret: true,
    value: 'KEY',
    help:
      'Admin key of that server (its API key where it has no other). Others on the machine can see flags: prefer the variable.',
    unset: 'no key is sent'
  },
  loadFromTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'model',
    value: 'SECONDS',
    help: 'Longest wait until that server is ready to send, and for each step of the transfer.'
  },
  modelRoot: {
    type: 'list',
    default: [],
    group: 'model',
    value: 'FOLDER',
    help: 'Folder from which weights may be loaded by request; may be given several times.',
    unset: 'the folder that holds the served model'
  },
  device: {
    type: 'string',
    default: 'cpu',
    group: 'engine',
    value: 'cpu|cuda|cuda:N',
    pattern: /^(cpu|cuda(:\d{1,4})?)$/,
    takes: 'cpu, cuda or cuda:N',
    spellings: { gpu: 'cuda', nvidia: 'cuda' },
    help:
      'Where the model computes: on the CPU, or on NVIDIA cards, rank 0 on card 0 (or N) of those that CUDA_VISIBLE_DEVICES shows. "refit devices" lists them.'
  },
  dtype: {
    type: 'choice',
    default: 'auto',
    group: 'engine',
    choices: ['auto', 'bfloat16', 'float32'],
    spellings: { bf16: 'bfloat16', fp32: 'float32', f32: 'float32', float: 'float32' },
    refused: {
      float16:
        'nothing computes in float16 here (checkpoints in float16 are converted on load); use bfloat16 or float32',
      half: 'nothing computes in float16 here (checkpoints in float16 are converted on load); use bfloat16 or float32'
    },
    help:
      'Dtype of weights and KV cache. auto: bfloat16, or float32 on a CPU where the checkpoint is float32. Cards take bfloat16 only.'
  },
  tp: {
    type: 'integer',
    default: 1,
    min: 1,
    max: 64,
    group: 'engine',
    aliases: ['tp-size', 'tensor-parallel-size'],
    help: 'Tensor-parallel ranks, each on a card of its own; on a CPU they are virtual and share its threads.'
  },
  baseGpuId: {
    type: 'integer',
    default: null,
    min: 0,
    max: 1023,
    group: 'engine',
    value: 'N',
    help: 'Card of rank 0 (as --device cuda:N); the other ranks take those behind it.',
    unset: 'the one of --device, else 0'
  },
  threads: {
    type: 'integer',
    default: null,
    min: 1,
    max: 1024,
    group: 'engine',
    help: 'Threads that compute.',
    unset: 'one per available core'
  },
  contextLength: {
    type: 'integer',
    default: null,
    min: 1,
    max: 2 ** 24,
    group: 'engine',
    value: 'TOKENS',
    help: 'Longest sequence, prompt and generated tokens together.',
    unset: "the model's own"
  },
  maxRunningRequests: {
    type: 'integer',
    default: null,
    min: 1,
    max: 65536,
    group: 'engine',
    help: 'Most requests that compute at the same time.',
    unset: '64, on cards 256'
  },
  maxQueuedRequests: {
    type: 'integer',
    default: 4096,
    min: 0,
    max: 2 ** 24,
    group: 'engine',
    help: 'Most requests that wait; one more is answered 503 with Retry-After.'
  },
  maxTotalTokens: {
    type: 'integer',
    default: null,
    min: 16,
    max: 2 ** 31,
    group: 'engine',
    value: 'TOKENS',
    help: 'Tokens that the KV cache holds.',
    unset: 'from --mem-fraction'
  },
  memFraction: {
    type: 'number',
    default: null,
    min: 0.01,
    max: 0.95,
    group: 'engine',
    aliases: ['mem-fraction-static'],
    value: 'FRACTION',
    help:
      'Share of the memory that is free at the start for weights and KV cache; with cards, of the fullest one. No more is taken than --max-running-requests can fill.',
    unset: '0.5, on cards 0.85'
  },
  maxPrefillTokens: {
    type: 'integer',
    default: null,
    min: 16,
    max: 2 ** 20,
    group: 'engine',
    aliases: ['chunked-prefill-size'],
    value: 'TOKENS',
    help: 'Most new tokens computed in one step; a longer prompt is taken in chunks.',
    unset: '512, on cards 4096'
  },
  pageSize: {
    type: 'integer',
    default: 16,
    min: 1,
    max: 1024,
    group: 'engine',
    value: 'TOKENS',
    help: 'Tokens per page of the KV cache; prefixes are shared by whole pages.'
  },
  randomSeed: {
    type: 'integer',
    default: null,
    min: 0,
    max: Number.MAX_SAFE_INTEGER,
    group: 'engine',
    help: 'Seed from which requests without a seed of their own draw theirs.',
    unset: 'a random one'
  },
  weightLoader: {
    type: 'list',
    default: [],
    group: 'engine',
    value: 'NAME=FILE',
    aliases: ['custom-weight-loader'],
    takes: '`name=./module.mjs`; several in the variable with `:` between them',
    help:
      'JavaScript module whose default export makes weights of what trainers post to /update_weights_from_tensor under the load_format NAME. Relative to the working folder; runs in this process with all its rights. May be repeated.',
    unset: 'none'
  },
  bucketBytes: {
    type: 'integer',
    default: 2 ** 32,
    min: 2 ** 20,
    max: 2 ** 40,
    group: 'engine',
    value: 'BYTES',
    help:
      'Most bytes of one broadcast through a process group: a tensor, or a flattened bucket. Buffers as large as the largest piece that was not received straight into the weights are kept with each group, on cards in their memory: two, or one where it is over 1 GiB and was the only one of its request.'
  },
  stagedBroadcasts: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help:
      'Broadcasts over NCCL are always received into buffers first, and a broadcast that breaks off changes nothing. Else those whose bytes the engine holds in the same order are received straight into the weights, which needs no buffers, and one that breaks off leaves its tensors torn.'
  },
  groupTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help:
      'Longest that a process group waits for its other ranks: to join, to connect, and for each piece of an update.'
  },
  ncclPath: {
    type: 'string',
    default: null,
    group: 'engine',
    value: 'FILE',
    help:
      "The libnccl.so.2 that process groups use. It must be of the trainer's version: the one in its site-packages/nvidia/nccl/lib.",
    unset: "$REFIT_NCCL, then that of torch, then the system's"
  },
  updateDeadline: {
    type: 'number',
    default: UPDATE_DEADLINE_SECONDS,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help: 'Longest that a weight update, or a release of memory, waits for running requests and for updates before it.'
  },
  enableWeightsCpuBackup: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help:
      'Weights whose memory is released keep a copy in host memory and come back whole. Else they come back torn, to be written by an update.'
  },
  enableReturnRoutedExperts: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help:
      'Keep which experts every token was routed to, beside the KV cache in host memory, for requests that ask for them (routing replay). Mixtures of experts only.'
  },
  watchdogTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help:
      'Longest that one step may take: then the device counts as lost, requests fail and the process ends with exit code 70.'
  },
  host: {
    type: 'string',
    default: '127.0.0.1',
    group: 'server',
    help: 'Address to listen on. One that others can reach needs --api-key or --admin-api-key, or --insecure.'
  },
  port: {
    type: 'integer',
    default: 30000,
    min: 0,
    max: 65535,
    group: 'server',
    help: 'Port to listen on; 0 takes a free one.'
  },
  apiKey: {
    type: 'string',
    default: null,
    group: 'server',
    secret: true,
    value: 'KEY',
    help:
      'Key that clients send as "Authorization: Bearer KEY". Others on the machine can see flags: prefer the variable.',
    unset: 'no key is asked for'
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
    help:
      'Store of a trainer (master_address) that process groups may be joined at, besides loopback and private addresses. Link-local and metadata addresses are refused always. May be repeated.',
    unset: 'loopback and private addresses'
  },
  dialects: {
    type: 'list',
    default: [],
    group: 'server',
    value: 'NAMES',
    separator: ',',
    takes: 'names of dialects',
    help: 'Whose routes there are besides those of SGLang, OpenAI and refit. May be repeated.',
    unset: 'all'
  },
  uploadFolder: {
    type: 'string',
    default: null,
    group: 'server',
    value: 'FOLDER',
    help:
      'Where uploads of weights that do not fit in memory are spooled before they are written. Needs room for the largest; a folder in memory (tmpfs) takes that memory.',
    unset: "the system's folder for temporary files"
  },
  uploadTimeout: {
    type: 'number',
    default: 60,
    min: 1,
    max: 86400,
    group: 'server',
    value: 'SECONDS',
    help: 'Longest that a client may send nothing of an upload of weights; then it is refused.'
  },
  shutdownTimeout: {
    type: 'number',
    default: 10,
    min: 0,
    max: 3600,
    group: 'server',
    value: 'SECONDS',
    help: 'How long running requests may go on after Ctrl-C or SIGTERM before they are aborted.'
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
    help: 'JSON file with options, keyed by their names here without dashes in front.',
    unset: 'none'
  }
} as const satisfies Record<string, Option>

export type OptionKey = keyof typeof OPTIONS

/** Every option with its value; null where an option has no default and was not set. */
export type Config = { readonly [K in OptionKey]: OptionValue<typeof OPTIONS[K]> }
