import type { OptionTable } from '../option.ts'
import { DRAFT_TOKENS } from '../../contract/speculation.ts'
import { OLD_WEIGHTS_TIMEOUT_SECONDS, UPDATE_DEADLINE_SECONDS } from '../../contract/update-deadline.ts'

/** Options of the engine: devices, sizes, weight updates. */
export const ENGINE_OPTIONS = {
  device: {
    type: 'string',
    default: 'cpu',
    group: 'engine',
    value: 'cpu|cuda|cuda:N',
    pattern: /^(cpu|cuda(:\d{1,4})?)$/,
    takes: 'cpu, cuda or cuda:N',
    spellings: { gpu: 'cuda', nvidia: 'cuda' },
    help: 'Device that computes: the CPU, or NVIDIA GPUs, rank 0 on GPU 0 (or N) of those that CUDA_VISIBLE_DEVICES ' +
      'shows. "refit devices" lists them.'
  },
  dtype: {
    type: 'choice',
    default: 'auto',
    group: 'engine',
    choices: ['auto', 'bfloat16', 'float16', 'float32'],
    spellings: {
      bf16: 'bfloat16',
      fp16: 'float16',
      f16: 'float16',
      half: 'float16',
      fp32: 'float32',
      f32: 'float32',
      float: 'float32'
    },
    help: 'Dtype of weights and KV cache. auto: bfloat16, also for checkpoints in float16, or float32 on a CPU if ' +
      'the checkpoint is float32. float16: on GPUs only. float32: on a CPU only.'
  },
  tp: {
    type: 'integer',
    default: 1,
    min: 1,
    max: 64,
    group: 'engine',
    aliases: ['tp-size', 'tensor-parallel-size'],
    help: 'Tensor-parallel ranks, each on a GPU of its own; on a CPU they are virtual and share its threads.'
  },
  dp: {
    type: 'integer',
    default: 1,
    min: 1,
    max: 64,
    group: 'engine',
    aliases: ['dp-size', 'data-parallel-size'],
    help:
      'Data-parallel engines behind the one port (docs/data-parallel.md), each a process with --tp ranks: on GPUs ' +
      'of its own, on a CPU with its part of the threads and memory. Limits such as --max-running-requests are each ' +
      "engine's."
  },
  baseGpuId: {
    type: 'integer',
    default: null,
    min: 0,
    max: 1023,
    group: 'engine',
    value: 'N',
    help: 'GPU of rank 0 (as --device cuda:N); the other ranks use the GPUs after it.',
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
    unset: '64, on GPUs 512'
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
    help: 'Fraction of the memory that is free at the start, for weights and KV cache; on GPUs, of the fullest one. ' +
      'No more is used than --max-running-requests needs.',
    unset: '0.5, on GPUs 0.85'
  },
  maxPrefillTokens: {
    type: 'integer',
    default: null,
    min: 16,
    max: 2 ** 20,
    group: 'engine',
    aliases: ['chunked-prefill-size'],
    value: 'TOKENS',
    help: 'Most new tokens computed in one step; a longer prompt is computed in chunks.',
    unset: '512, on GPUs 4096, of models with experts 8192 with more than 100 GB'
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
    help: 'Seed that derives the seeds of requests without one.',
    unset: 'a random one'
  },
  weightLoader: {
    type: 'list',
    default: [],
    group: 'engine',
    value: 'NAME=FILE',
    aliases: ['custom-weight-loader'],
    takes: '`name=./module.mjs`; several in the variable with `:` between them',
    help: 'JavaScript module whose default export turns the bodies that trainers post to ' +
      '/update_weights_from_tensor under the load_format NAME into weights. Relative to the working folder; ' +
      'runs in this process with all its rights. May be repeated.',
    unset: 'none'
  },
  bucketBytes: {
    type: 'integer',
    default: 2 ** 32,
    min: 2 ** 20,
    max: 2 ** 40,
    group: 'engine',
    value: 'BYTES',
    help: 'Most bytes of one broadcast through a process group: a tensor, or a flattened bucket. Each group keeps ' +
      'buffers as large as the largest piece that was not received straight into the weights, on GPUs in their ' +
      'memory: two, or one if the piece is over 1 GiB and was the only one of its request.'
  },
  skipServerWarmup: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Start the thread that reads tensors with the first large body, and not before. A first update of many ' +
      'handles takes longer, and a server that gets none saves half a second of CPU time.'
  },
  stagedBroadcasts: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Always receives NCCL broadcasts into buffers first, so a broadcast that breaks off changes nothing. ' +
      'Otherwise broadcasts whose bytes the engine holds in the same order are received straight into the ' +
      'weights: this needs no buffers, but one that breaks off leaves its tensors torn.'
  },
  groupTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help: 'Longest time that a process group waits for its other ranks: to join, to connect, and for each piece of ' +
      'an update.'
  },
  ncclPath: {
    type: 'string',
    default: null,
    group: 'engine',
    value: 'FILE',
    help: "The libnccl.so.2 that process groups use. It must have the trainer's version: the one in its " +
      'site-packages/nvidia/nccl/lib.',
    unset: "$REFIT_NCCL, then that of torch, then the system's"
  },
  updateDeadline: {
    type: 'number',
    default: UPDATE_DEADLINE_SECONDS,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help: 'Longest time that a weight update, or a release of memory, waits for running requests and for updates ' +
      'before it.'
  },
  disableCudaGraph: {
    type: 'boolean',
    default: false,
    group: 'engine',
    aliases: ['enforce-eager'],
    help: 'GPUs launch the kernels of a decode step one by one instead of as a CUDA graph: slower, with the same ' +
      'results, and a failure names its operation.'
  },
  deterministic: {
    type: 'boolean',
    default: false,
    group: 'engine',
    aliases: ['enable-deterministic-inference'],
    help: 'Results do not depend on what runs beside a request, on how its prompt is cut into steps, on graphs, or ' +
      'on --tp, bit for bit (docs/deterministic.md). On a CPU they depend at most on --tp.'
  },
  disableOverlapSchedule: {
    type: 'boolean',
    default: false,
    group: 'engine',
    aliases: ['no-async-scheduling'],
    help: 'A step is planned when the one before has ended, not while it runs: slower, with the same results.'
  },
  speculative: {
    type: 'choice',
    default: 'off',
    group: 'engine',
    choices: ['off', 'siblings'],
    help: 'siblings: guesses the next tokens of a request from outputs of the same prompt, of any weights, and ' +
      'computes them in one step. It keeps those that it samples itself, so outputs stay as they are ' +
      '(docs/speculation.md).'
  },
  speculativeNumDraftTokens: {
    type: 'integer',
    default: DRAFT_TOKENS,
    min: 1,
    max: 128,
    group: 'engine',
    value: 'N',
    help: 'Most guessed tokens of a request in one step (--speculative).'
  },
  disableAdaptiveSpeculation: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'A guess is computed if its chance is high enough, however long steps with guesses take: slower, but a run ' +
      'can be repeated (--speculative).'
  },
  enableWeightsCpuBackup: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Weights whose memory is released keep a copy in host memory and come back whole. Otherwise they come ' +
      'back torn, until an update writes them.'
  },
  shadowWeights: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Holds a second set of weights. Updates write it while generation goes on, and then the sets change places ' +
      'between two steps; an update that fails changes nothing. Takes the memory of the weights twice.'
  },
  shadowRate: {
    type: 'number',
    default: 100,
    min: 0,
    max: 10000,
    group: 'engine',
    value: 'GB/S',
    help: 'Gigabytes per second that an update writes at most into the second set of weights on each GPU ' +
      '(--shadow-weights), so that generation keeps its pace; 0: as fast as it goes. Bytes that NCCL receives ' +
      "straight into the weights come at their sender's rate."
  },
  oldWeightsTimeout: {
    type: 'number',
    default: OLD_WEIGHTS_TIMEOUT_SECONDS,
    min: 0.001,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help: 'Longest time that requests may finish on the weights before an update with on_running "finish_old" ' +
      '(--shadow-weights); then they go on with the new ones. The next update waits for them.'
  },
  enableReturnRoutedExperts: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Records the experts of every token, next to the KV cache in host memory, for requests that return them ' +
      '(routing replay). Mixtures of experts only.'
  },
  enableReturnSamplingMask: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: "Replies of vLLM's /inference/v1/generate have the sampling mask: the tokens that top_k, top_p and min_p " +
      'kept at each position.'
  },
  watchdogTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'engine',
    value: 'SECONDS',
    help: 'Longest time that one step may take. After it the device counts as lost, requests fail and the process ' +
      'ends with exit code 70.'
  }
} as const satisfies OptionTable
