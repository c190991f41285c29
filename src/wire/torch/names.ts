import type { PickleNames } from '../pickle/read.ts'
import { PickleName } from '../pickle/values.ts'
import type { PickleUse } from '../pickle/values.ts'
import { TORCH_DTYPES, TORCH_STORAGES } from './dtypes.ts'

// The closed set of names in torch's handles and in the structures that SGLang and its trainers put around them.

const REDUCTIONS = 'torch.multiprocessing.reductions'
const PLAIN = "the tensor was pickled with its data inside. Serialise with ForkingPickler (SGLang's " +
  'MultiprocessingSerializer), which sends handles, or upload safetensors'
const SUBCLASS =
  'it rebuilds a tensor subclass (DTensor, ShardedTensor, a quantised tensor, a parameter class of an engine). ' +
  'Send plain tensors: full_tensor() of a DTensor, the gathered one of a ShardedTensor, dequantize(), or .data'
const SHARDED = 'a DTensor or its parts. Send whole tensors: gather with full_tensor()'
const SPARSE = 'sparse and nested tensors are not weights. Send dense ones: to_dense()'
const ASCEND = 'memory of an Ascend NPU, which refit cannot open'
const LORA = "PEFT's configuration of an adapter. It goes into config_dict of /load_lora_adapter_from_tensors, as JSON"

const known = new Map<string, Map<string, PickleName | string>>()

function put (module: string, name: string, meaning: PickleName | string): void {
  const names = known.get(module) ?? new Map<string, PickleName | string>()
  known.set(module, names.set(name, meaning))
}

function add (use: PickleUse, modules: string[], names: readonly string[], role?: string): void {
  for (const module of modules) {
    for (const name of names) put(module, name, new PickleName(module, name, use, role ?? name))
  }
}

function refuse (reason: string, modules: string[], names: readonly string[]): void {
  for (const module of modules) for (const name of names) put(module, name, reason)
}

add('call', [REDUCTIONS], [
  'rebuild_cuda_tensor',
  'rebuild_tensor',
  'rebuild_typed_storage',
  'rebuild_typed_storage_child',
  'rebuild_storage_fd',
  'rebuild_storage_filename',
  'rebuild_storage_empty',
  'rebuild_meta_tensor'
])
add('value', ['torch'], ['Tensor'], 'tensor class')
add('value', ['torch.nn.parameter'], ['Parameter'], 'tensor class')
add('value', ['torch.storage'], ['TypedStorage', '_TypedStorage', 'UntypedStorage', '_UntypedStorage'], 'storage class')
add('value', ['torch', 'torch.cuda'], TORCH_STORAGES, 'legacy storage class')
add('value', ['torch'], TORCH_DTYPES, 'dtype')
add('tuple', ['torch'], ['Size'])
add('call', ['torch'], ['device'])
add('class', ['multiprocessing.resource_sharer'], ['DupFd'])
// How Python writes bytes, sets and ordered dicts, protocol by protocol.
add('latin1', ['_codecs'], ['encode'])
add('bytes', ['builtins', '__builtin__'], ['bytes', 'bytearray'])
add('set', ['builtins', '__builtin__'], ['set', 'frozenset'])
add('dict', ['collections'], ['OrderedDict'])

refuse(PLAIN, ['torch._utils'], [
  '_rebuild_tensor',
  '_rebuild_tensor_v2',
  '_rebuild_tensor_v3',
  '_rebuild_parameter',
  '_rebuild_parameter_with_state'
])
refuse(PLAIN, ['torch.storage'], ['_load_from_bytes'])
refuse('numpy arrays are not taken. Send torch tensors', [
  'numpy',
  'numpy.core.multiarray',
  'numpy._core.multiarray',
  'numpy.core.numeric',
  'numpy._core.numeric'
], ['ndarray', 'dtype', '_reconstruct', '_frombuffer', 'scalar'])
refuse(SUBCLASS, ['torch._tensor'], ['_rebuild_from_type_v2', '_rebuild_from_type'])
refuse(SUBCLASS, ['torch._utils'], [
  '_rebuild_wrapper_subclass',
  '_rebuild_qtensor',
  '_rebuild_device_tensor_from_numpy',
  '_rebuild_device_tensor_from_cpu_tensor'
])
refuse(SPARSE, [REDUCTIONS], ['rebuild_nested_tensor', 'rebuild_sparse_coo_tensor', 'rebuild_sparse_compressed_tensor'])
refuse(SPARSE, ['torch._utils'], ['_rebuild_sparse_tensor', '_rebuild_sparse_csr_tensor', '_rebuild_nested_tensor'])
refuse('CUDA events are sent inside of tensor handles only', [REDUCTIONS], ['rebuild_event'])

// Trainers have copies of these in modules of their own, so any module is accepted.
const ANYWHERE: ReadonlyMap<string, readonly [PickleUse, role: string]> = new Map([
  ['_rebuild_cuda_tensor_modified', ['call', 'rebuild_cuda_tensor']],
  ['FlattenedTensorMetadata', ['class', 'FlattenedTensorMetadata']],
  ['LocalSerializedTensor', ['class', 'LocalSerializedTensor']]
])
const REFUSED_ANYWHERE: ReadonlyMap<string, string> = new Map([
  ['DTensor', SHARDED],
  ['DTensorSpec', SHARDED],
  ['DeviceMesh', SHARDED],
  ['ShardedTensor', 'a ShardedTensor (FSDP 1). Send whole tensors: gather the full state dict'],
  ['rebuild_npu_tensor', ASCEND],
  ['_rebuild_npu_tensor_modified', ASCEND],
  ['LoraConfig', LORA],
  ['LoRAConfig', LORA]
])
const MODULE = /^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*$/

/**
 * The same, with records for all other names: to find the handles in a refused pickle. Nothing is imported here either.
 */
export const salvageNames: PickleNames = (module, name) => {
  const found = torchNames(module, name)
  return found instanceof PickleName ? found : new PickleName(module, name, 'any', 'unknown')
}

/** The names of tensor payloads. */
export const torchNames: PickleNames = (module, name) => {
  const found = known.get(module)?.get(name)
  if (found !== undefined) return found
  const anywhere = ANYWHERE.get(name)
  if (anywhere !== undefined && MODULE.test(module)) return new PickleName(module, name, ...anywhere)
  return REFUSED_ANYWHERE.get(name)
}
