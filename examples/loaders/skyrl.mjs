// SkyRL's trainers send SGLang's /update_weights_from_tensor one tensor, "ipc_request", and name a custom loader. The
// tensor's bytes are base64 of a pickled request, an end mark and padding. The request contains the handles of the
// weights. refit can open them:
//
//   refit serve MODEL --weight-loader NAME=examples/loaders/skyrl.mjs
//
// NAME is what SkyRL sends as load_format:
// skyrl_train.inference_engines.sglang.sglang_engine.sglang_custom_weight_loader. Two forms of the request are
// supported: handles of one buffer that holds all tensors of one dtype, one after another (`sizes` in elements), or, in
// older versions, a handle for each tensor.

const END = '__END_OF_REQUEST__'

/** @type {import('refit').WeightLoader} */
export default async function skyrl (tensors, { read, unpickle }) {
  const sent = tensors.find(({ name }) => name === 'ipc_request')
  if (sent === undefined || tensors.length !== 1) {
    const names = tensors.map(({ name }) => name).slice(0, 3).join(', ') || 'none'
    throw new Error(`expected one tensor "ipc_request", got ${names}`)
  }
  const bytes = Buffer.from(await read(sent))
  const end = bytes.indexOf(END)
  if (end === -1) throw new Error(`the request has no ${END}`)
  const request = await unpickle(bytes.subarray(0, end), { classes: ['CudaIpcWeightUpdateRequest'] })
  const { names, dtypes, shapes } = request
  if (![dtypes, shapes].every(list => list?.length === names?.length)) {
    throw new Error('names, dtypes and shapes of the request have different lengths')
  }
  const weights = request.sizes === undefined
    ? names.map((_, i) => request.extras[i].ipc_handles)
    : unpack(request)
  return names.map((name, i) => {
    const { dtype, shape } = weights[i]
    if (dtype !== String(dtypes[i]).replace(/^torch\./, '')) {
      throw new Error(`${name} is announced as ${dtypes[i]} and shared as ${dtype}`)
    }
    if (String(shape) !== String(shapes[i])) {
      throw new Error(`${name} is announced as [${shapes[i]}] and shared as [${shape}]`)
    }
    return [name, weights[i]]
  })
}

/** Views of the tensors in the one buffer. */
function unpack ({ names, shapes, sizes, ipc_handles: buffer }) {
  let at = 0
  return names.map((name, i) => {
    const shape = [...shapes[i]]
    const elements = shape.reduce((product, size) => product * size, 1)
    if (elements !== sizes[i]) throw new Error(`${name} has ${elements} elements, but its size is ${sizes[i]}`)
    const view = buffer.view({ shape, offset: at * buffer.itemBytes })
    at += elements
    return view
  })
}
