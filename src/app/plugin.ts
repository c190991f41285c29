import { arch, platform, release } from 'node:os'
import { basename, dirname, resolve } from 'node:path'
import { inspect } from 'node:util'
import type { TypeBoxTypeProvider } from '@fastify/type-provider-typebox'
import type { FastifyInstance } from 'fastify'
import ui from '../../routes/ui/index.ts'
import { heldWeights } from '../engine/held-weights.ts'
import { guard } from '../http/auth.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { installBodyParsers } from '../http/body-parser.ts'
import { VersionWaits } from '../http/generation/bound-version.ts'
import type { RouteContext } from '../http/context.ts'
import { rankOf } from '../http/generation/data-parallel-rank.ts'
import { errorHandler, refusalBody, refusalOf } from '../http/error-reply.ts'
import { BODY_LIMIT, MAX_BATCH, MAX_BODY_BYTES, MAX_REQUEST_MEMORY, SAMPLES_MEMORY } from '../http/limits.ts'
import { LiveRequests } from '../http/generation/live-requests.ts'
import { LoadedFrom } from '../updates/loaded-from.ts'
import { UpdateLog } from '../updates/update-log.ts'
import { refuseMisplacedFields } from '../http/misplaced-fields.ts'
import { logUnknownFields } from '../http/unknown-fields.ts'
import { BodyMemory } from '../http/upload/body-memory.ts'
import { RequestMemory } from '../http/generation/request-memory.ts'
import { readSamplingDefaults } from '../http/generation/sampling-defaults.ts'
import { validatorCompiler } from '../http/validation.ts'
import { packageVersion } from '../http/version.ts'
import { KeptSamples } from '../http/samples/kept-samples.ts'
import type { KeepRule } from '../http/samples/kept-samples.ts'
import { TruthMeter } from '../http/samples/truth-meter.ts'
import { WeightDigests } from '../http/samples/weights-digest.ts'
import { Metrics } from '../http/metrics.ts'
import { stringify } from '../http/ordered-json.ts'
import { chooseMetricNames } from '../http/metric-families.ts'
import type { MetricNames } from '../http/metric-families.ts'
import { countRefusals } from '../http/count-refusals.ts'
import { RecentErrors } from '../http/recent-errors.ts'
import { PeerLoads } from '../peer/peer-loads.ts'
import type { StoreRules } from '../peer/remote-stores.ts'
import { SendGroups } from '../peer/send-groups.ts'
import { WeightGroups } from '../process-groups/weight-groups.ts'
import { ShardPlans } from '../shards/shard-plans.ts'
import { ShardParts } from '../sources/shards/shard-parts.ts'
import { DistributedReceiver } from '../sources/distributed/distributed.ts'
import { isAdapterFolder, openAdapterFolder } from '../sources/disk/adapter-folder.ts'
import { openDiskSource } from '../sources/disk/disk.ts'
import { KnownHeaders } from '../sources/disk/known-headers.ts'
import { KeptTensors } from '../sources/tensor/kept-tensors.ts'
import { TensorReceiver } from '../sources/tensor/tensor-receiver.ts'
import type { WeightLoader } from '../sources/disk/weight-loader.ts'
import { UploadReceiver } from '../sources/upload/upload-receiver.ts'
import { encodeLabel, WEIGHT_VERSION_HEADER } from '../http/weight-version-header.ts'
import { WeightPulls } from '../deltas/weight-pulls.ts'
import { masterPolicy } from '../rendezvous/master-policy.ts'
import { CallJoiner } from '../weights/call-joiner.ts'
import { replyParsers } from '../text/reply-parsers.ts'
import type { Telemetry } from '../telemetry/telemetry.ts'
import { loadTokenizer } from '../text/tokenizer.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import type { PageOptions } from '../ui/engine-source.ts'
import { redirectBrowsers } from '../ui/page.ts'
import { chooseDialects, chooseRoutes, dialectOf } from './dialects.ts'
import type { DialectName } from './dialects.ts'

export interface RefitPluginOptions {
  engine: RolloutEngine
  /** null: token ids only. Absent: the tokenizer in the model's folder, if there is one. */
  tokenizer?: Tokenizer | null
  /** Format of the calls in chat replies (--tool-call-parser). */
  toolCallParser?: string | undefined
  /** Format of the reasoning in chat replies (--reasoning-parser). */
  reasoningParser?: string | undefined
  /** Grammars of requests begin with the reasoning, not behind it (--enable-in-reasoning). */
  enableInReasoning?: boolean | undefined
  /** Required on all routes except health and metrics. */
  apiKey?: string | undefined
  /** Required instead on the routes that change weights or the state of the engine. */
  adminApiKey?: string | undefined
  /**
   * Folders from which requests may load weights (default: the one that contains the model's folder). Symlinks may not
   * lead out.
   */
  modelRoots?: string[]
  /**
   * Custom loaders by name: they make weights of what trainers send to /update_weights_from_tensor with that name as
   * `load_format`. They run in this process, with all its rights.
   */
  weightLoaders?: Readonly<Record<string, WeightLoader>>
  /** Folder where uploads that do not fit in memory are spooled (default the system's folder for temporary files). */
  uploadFolder?: string | undefined
  /** Most memory that waiting uploads take (default 192 MiB). */
  uploadMemoryBytes?: number | undefined
  /** Longest that an upload may send nothing, in milliseconds (default 60000). */
  uploadTimeoutMs?: number | undefined
  /** Most bytes of one broadcast through a process group, and of each of its staging buffers (default 4 GiB). */
  bucketBytes?: number | undefined
  /** Start the thread that reads tensors before a body needs it; see --skip-server-warmup (default true). */
  warmUp?: boolean | undefined
  /** Broadcasts over NCCL are never received straight into the weights; see --staged-broadcasts (default false). */
  stagedBroadcasts?: boolean | undefined
  /** Longest that each phase of a process group may take, in milliseconds (default 300000). */
  groupTimeoutMs?: number | undefined
  /**
   * Host names of the app that requests without a key may name (default: any, but not in requests of pages; see
   * PageOptions). Null: foreign pages are not refused, because the host app does it.
   */
  allowedHosts?: readonly string[] | null | undefined
  /** Stores of trainers that refit may connect to, besides loopback and private addresses; see --allow-master. */
  allowMasters?: readonly string[] | undefined
  /** The trainer's libnccl.so.2 (default: the one that the addon finds). */
  ncclPath?: string | undefined
  /** The dialects whose routes are served besides SGLang's, OpenAI's and refit's own (default all). */
  dialects?: readonly DialectName[] | undefined
  /**
   * Source of sampling parameters that requests of OpenAI's routes leave out: `model`, its generation_config.json
   * (default); `openai`, OpenAI's defaults.
   */
  samplingDefaults?: 'model' | 'openai' | undefined
  /** Longest that a request waits for the weight version that it is bound to, in milliseconds (default 30000). */
  versionWaitMs?: number | undefined
  /** The names under which `/metrics` reports (default all). */
  metricNames?: readonly MetricNames[] | undefined
  /** Most samples of one request. */
  maxBatch?: number
  /** Most bytes of the body of a request that does not change weights or state (default 8 MiB). */
  maxBodyBytes?: number | undefined
  /** Most memory of the bodies of requests under way, in bytes (default a quarter of the heap's limit). */
  bodyMemory?: number | undefined
  /** Most bytes that the results of one request may take (default 1 GiB). */
  maxRequestMemory?: number | undefined
  /** Replies of vLLM's /inference/v1/generate have the sampling mask; default false. */
  samplingMasks?: boolean
  /** Sends traces and metrics to an OpenTelemetry collector; the caller closes it. */
  telemetry?: Telemetry | undefined
  /** The configuration as `GET /report` shows it, without keys (src/config/redact.ts). */
  shownConfig?: Readonly<Record<string, unknown>> | undefined
  /** Most bytes of the finished samples that are kept for receipts (default 16 MiB); 0 keeps none. */
  samplesMemory?: number | undefined
  /** The samples that are kept: of requests with `receipt` (`asked`, default), or `all`. */
  keepSamples?: KeepRule | undefined
  /** Mean difference between a trainer's and the engine's logprobs above which /truth logs a warning; default none. */
  truthWarn?: number | null | undefined
  /** Serve the page at /ui (default false). With `prompts` it shows what running requests say. */
  ui?: boolean | PageOptions
}

const BUCKET_BYTES = 2 ** 32
const VERSION_WAIT_MS = 30_000
const GROUP_TIMEOUT_MS = 300_000

/** Delay after which the thread that reads tensors starts, if no request has started it before. */
const WARM_AFTER_MS = 1000

/**
 * A rollout server as a Fastify plugin: `app.register(refit, { engine, prefix: '/rollout' })`. Encapsulated:
 * validators, parsers, error handler and hooks are its own, and a host's routes see none of them. The caller keeps the
 * engine and closes it.
 */
export default async function refit (app: FastifyInstance, options: RefitPluginOptions): Promise<void> {
  checkOptions(options)
  const errors = new RecentErrors()
  const { context, receiver } = await makeContext(options, errors)
  options.telemetry?.watch(app, context.metrics)
  installHandlers(app, options)
  errors.watch(app)
  countRefusals(app, context.metrics.registry, 'refit:requests_refused_total')
  app.addHook('onSend', async (_request, reply, payload) => {
    const label = encodeLabel(options.engine.weightVersion)
    if (label !== undefined) reply.header(WEIGHT_VERSION_HEADER, label)
    return payload
  })
  watchReceivers(context, receiver)
  closeWith(app, context, receiver)
  // They share a scope: one for each file takes a tenth of the CPU time in which a server starts.
  const scope = app.withTypeProvider<TypeBoxTypeProvider>()
  for (const routes of chooseRoutes(context.dialects)) await routes(scope, { context })
  const page = options.ui === true ? {} : options.ui
  if (page !== undefined && page !== false) await app.register(ui, { context, page })
}

/** `receiver`: the tensor receiver of the context, with the methods that routes do not use. */
async function makeContext (
  options: RefitPluginOptions,
  errors: RecentErrors
): Promise<{ context: RouteContext, receiver: TensorReceiver }> {
  const { engine } = options
  const roots = options.modelRoots ?? defaultRoots(engine.info.modelPath)
  const receiver = new TensorReceiver({
    ranks: engine.info.ranks,
    gpus: engine.info.gpus.map(({ uuid }) => uuid),
    visible: engine.info.visibleGpus ?? null,
    loaders: options.weightLoaders ?? {},
    deltas: engine.deltaHost,
    warmUp: options.warmUp ?? true
  })
  const kept = new KeptTensors({ closeMappings: engine.closeMappings?.bind(engine) })
  const uploads = new UploadReceiver({
    folder: options.uploadFolder,
    stallMs: options.uploadTimeoutMs,
    memoryBytes: options.uploadMemoryBytes
  })
  const policy = masterPolicy(options.allowMasters)
  const groups = new WeightGroups({
    host: engine.groupHost,
    policy,
    timeoutMs: options.groupTimeoutMs ?? GROUP_TIMEOUT_MS,
    ncclPath: options.ncclPath,
    staged: options.stagedBroadcasts
  })
  const samples = new KeptSamples(options.samplesMemory ?? SAMPLES_MEMORY, options.keepSamples ?? 'asked')
  const plans = shardPlansOf(engine)
  const disk = { roots, known: new KnownHeaders() }
  const context: RouteContext = {
    engine,
    samples,
    digests: new WeightDigests(engine),
    truth: new TruthMeter(samples),
    truthWarn: options.truthWarn ?? null,
    tokenizer: options.tokenizer === undefined ? await loadTokenizer(engine.info.modelPath) : options.tokenizer,
    parsers: replyParsers(options.toolCallParser, options.reasoningParser, options.enableInReasoning),
    live: new LiveRequests(engine),
    versions: new VersionWaits(engine, options.versionWaitMs ?? VERSION_WAIT_MS),
    metrics: new Metrics(engine, chooseMetricNames(options.metricNames)),
    updates: new UpdateLog(engine),
    retries: new CallJoiner(),
    adapterRetries: new CallJoiner(),
    samplingDefaults: options.samplingDefaults === 'openai' ? {} : await readSamplingDefaults(engine.info.modelPath),
    maxBatch: options.maxBatch ?? MAX_BATCH,
    memory: new RequestMemory(options.maxRequestMemory ?? MAX_REQUEST_MEMORY),
    samplingMasks: options.samplingMasks ?? false,
    openCheckpoint: async path => await openDiskSource(path, disk),
    openAdapter: async path => await openAdapterFolder(path, disk),
    isAdapter: async path => await isAdapterFolder(path, disk),
    tensors: receiver,
    kept,
    groups,
    plans,
    parts: plans === null ? null : new ShardParts(plans, options.uploadTimeoutMs),
    ...transfersOf(engine, { policy, ncclPath: options.ncclPath }),
    distributed: new DistributedReceiver(
      groups,
      options.bucketBytes ?? BUCKET_BYTES,
      engine.weightSets !== undefined
    ),
    uploads,
    pulls: new WeightPulls({ roots, baseFolder: engine.info.modelPath }),
    dialects: chooseDialects(options.dialects ?? []),
    loaded: new LoadedFrom({ modelPath: engine.info.modelPath, loadFormat: 'auto' }, engine.transactions),
    version: packageVersion(),
    startedAt: Date.now() / 1000,
    errors,
    facts: { platform: `${platform()} ${release()} ${arch()}`, config: options.shownConfig ?? null }
  }
  return { context, receiver }
}

function installHandlers (app: FastifyInstance, options: RefitPluginOptions): void {
  app.setValidatorCompiler(validatorCompiler)
  // Schemas of replies are documentation. Serializing by them would drop fields, and fail on values that JSON cannot
  // hold.
  app.setSerializerCompiler(() => serialize)
  app.setReplySerializer(serialize)
  app.setErrorHandler(errorHandler)
  // Fastify adds a charset; some clients compare the whole value, so it is removed.
  app.addHook('onSend', async (_request, reply, payload) => {
    if (reply.getHeader('content-type') === 'application/json; charset=utf-8') {
      reply.header('content-type', 'application/json')
    }
    return payload
  })
  installBodyParsers(app, new BodyMemory(options.bodyMemory), options.maxBodyBytes)
  app.addHook('onRequest', async ({ headers, method, routeOptions }) => {
    if (method === 'POST' && routeOptions.config.auth === 'normal') rankOf(headers, 1)
  })
  app.addHook('onRoute', route => {
    const dialect = dialectOf(route.routePath)
    if (dialect !== undefined) route.config = { ...route.config, dialect }
  })
  if (options.ui !== undefined && options.ui !== false) redirectBrowsers(app)
  guard(app, options)
  refuseMisplacedFields(app)
  logUnknownFields(app)
  app.addHook('onRoute', route => {
    const { auth } = route.config ?? {}
    route.bodyLimit ??= auth === 'admin' ? BODY_LIMIT : options.maxBodyBytes ?? MAX_BODY_BYTES
  })
}

function watchReceivers (
  { metrics, kept, uploads, groups, truth, samples }: RouteContext,
  receiver: TensorReceiver
): void {
  metrics.watchHandles(receiver.counts)
  metrics.watchKept(() => kept.stats)
  metrics.watchUploads(uploads)
  metrics.watchGroups(groups)
  metrics.watchTruth(truth, samples)
}

/** Starts the tensor receiver's thread a while after the plugin, and ends everything with the app. */
function closeWith (
  app: FastifyInstance,
  { groups, kept, uploads, metrics }: RouteContext,
  receiver: TensorReceiver
): void {
  // After the start is over; a server that ends before does not need the thread.
  const warming = setTimeout(() => {
    receiver.start()
  }, WARM_AFTER_MS)
    .unref()
  // Requests that wait for a trainer's broadcasts would delay the close.
  app.addHook('preClose', async () => {
    groups.abort()
  })
  app.addHook('onClose', async () => {
    clearTimeout(warming)
    await groups.close()
    await kept.close()
    await receiver.close()
    uploads.close()
    metrics.close()
  })
}

/** Throws a TypeError for mistakes that only callers without types can make, and that would fail much later. */
function checkOptions (options: RefitPluginOptions): void {
  const { engine } = options as { engine?: Partial<RolloutEngine> | null }
  if (typeof engine?.info !== 'object') {
    const got = engine === undefined
      ? ''
      : `; got ${engine instanceof Promise ? 'a promise: await it' : inspect(engine, { depth: 0 }).slice(0, 100)}`
    throw new TypeError(`refit needs an engine: app.register(refit, { engine: await createEngine(model) })${got}`)
  }
  for (const name of ['modelRoots', 'allowedHosts', 'allowMasters', 'dialects', 'metricNames'] as const) {
    const list: unknown = options[name]
    if (
      list === undefined || (name === 'allowedHosts' && list === null) ||
      (Array.isArray(list) && list.every(item => typeof item === 'string'))
    ) continue
    throw new TypeError(`refit: ${name} is ${inspect(list, { depth: 0 }).slice(0, 100)}; expected an array of strings`)
  }
}

// An error comes here only if a hook of a host failed after the error handler had run.
function serialize (data: unknown): string {
  return stringify(data instanceof Error ? refusalBody('sglang', refusalOf(data)) : data)
}

function defaultRoots (modelPath: string): string[] {
  const holder = dirname(resolve(modelPath))
  // Files in a Hugging Face cache are links from snapshots/<revision> to blobs beside it.
  return [basename(holder) === 'snapshots' ? dirname(holder) : holder]
}

/** Null if this process holds no parameters. */
function shardPlansOf (engine: RolloutEngine): ShardPlans | null {
  const held = heldWeights(engine)
  return held === undefined ? null : new ShardPlans(held.store.table)
}

/** Sends and loads weights between engines; null if this process holds none. */
function transfersOf (engine: RolloutEngine, rules: StoreRules): Pick<RouteContext, 'sending' | 'peerLoads'> {
  const held = heldWeights(engine)
  if (held === undefined) return { sending: null, peerLoads: null }
  const peerLoads = new PeerLoads(held, engine.info, rules)
  return { sending: new SendGroups(held, rules, peerLoads), peerLoads }
}
