// The package's front door. Importing it loads no native code: the addon is opened when an engine is made.

export { default } from './app/plugin.ts'
export { default as refit } from './app/plugin.ts'
export type { RefitPluginOptions } from './app/plugin.ts'
export { buildServer, createServer } from './app/server.ts'
export type { ServerOptions } from './app/server.ts'
export { createEngine } from './app/create-engine.ts'
export { endProcess } from './engine/end-process.ts'
export type { EngineOptions } from './engine/engine-options.ts'
export { RemoteEngine } from './remote/remote-engine.ts'
export type { RemoteEngineOptions } from './remote/remote-engine.ts'
export { createGateway } from './app/gateway-server.ts'
export type { GatewayServer, GatewayServerOptions } from './app/gateway-server.ts'
export type { Adapter, AdapterFiles, AdapterReport, LoadAdapterRequest } from './client/adapters.ts'
export { RefitClient } from './client/client.ts'
export type { ClientOptions, GenerateMeta, GenerateOutput, UpdateReport, WireLogprob } from './client/client.ts'
export type { LoadedTensor, LoaderTools, MadeTensor, WeightLoader } from './sources/disk/weight-loader.ts'
export type { LoaderTensor, ViewOptions } from './sources/disk/loader-tensor.ts'
export type { DiskUpdateRequest, GenerateRequestBody, SamplingRequest } from './client/requests.ts'
export type { LoggedUpdate, UpdateTrace } from './client/updates.ts'
export type { SampleReceipt, TruthClaim, TruthDifferences, TruthReport } from './client/samples.ts'
export { ClientError } from './client/client-error.ts'
export { ERROR_CODES, RefitError } from './errors.ts'
export type { ErrorCode } from './errors.ts'
export { loadTokenizer } from './text/tokenizer.ts'
export type * from './text/tokenizer.ts'
export type * from './contract/rollout-engine.ts'
export type * from './contract/weight-transactions.ts'
export type {
  AnnouncedTensor,
  PatchSource,
  StoredSource,
  StreamedSource,
  Transport,
  WeightSource,
  WriteReport
} from './contract/weight-source.ts'
