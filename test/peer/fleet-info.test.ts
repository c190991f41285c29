import t from 'tap'
import { join } from 'node:path'
import { chooseRoute, fleetInfo, FLEET_PROTOCOL, loadRefusal } from '../../src/peer/fleet-info.ts'
import type { FleetInfo, Receiver } from '../../src/peer/fleet-info.ts'
import { describeModel, layoutDigest, modelDifference, tableDigest } from '../../src/model/describe-model.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { readArchitecture } from '../../src/model/read-config.ts'
import { packageRoot } from '../../src/root.ts'

const arch = await readArchitecture(join(packageRoot, 'models/adder'))
const model = describeModel(arch)
const tensors = tableDigest(buildModelTable(arch, 1))
const parameters = layoutDigest(buildModelTable(arch, 1))
const own: Receiver = { model, tensors, parameters, dtype: 'bfloat16', device: 'cpu', gpus: [], ranks: 1 }
const peer: FleetInfo = {
  server: 'refit',
  version: '1',
  protocol: FLEET_PROTOCOL,
  engine: 'other',
  model,
  tensors,
  parameters,
  dtype: 'bfloat16',
  device: 'cpu',
  cards: [],
  tp_size: 1,
  weight_version: 'v',
  not_ready: null
}

t.test('an engine reports each reason why it cannot send its weights', async t => {
  const table = buildModelTable(arch, 1)
  const ready = {
    info: { dtype: 'bfloat16', device: 'cpu', gpus: [], ranks: 1 },
    weights: { state: 'current' },
    weightVersion: 'v',
    transactions: { current: null },
    closed: false
  }
  const held = { store: { id: 'one', table }, model } as unknown as Parameters<typeof fleetInfo>[1]
  const reason = (change: object, from: string | null = null): string | null =>
    fleetInfo({ ...ready, ...change } as unknown as Parameters<typeof fleetInfo>[0], held, '1', from).not_ready
  t.equal(reason({}), null)
  t.equal(reason({ closed: true }), 'it is closed')
  t.match(reason({ weights: { state: 'torn', tensors: ['a'], reason: 'a is torn' } }), /torn: a is torn/)
  t.match(reason({ weights: { state: 'asleep', tags: ['kv_cache', 'weights'] } }), /memory of its weights is released/)
  t.equal(reason({ weights: { state: 'asleep', tags: ['kv_cache'] } }), null, 'its weights are there')
  t.match(reason({ transactions: { current: { id: 't' } } }), /a weight transaction is open/)
  t.equal(reason({}, 'http://10.0.0.7:30000'), 'it is loading weights itself, from http://10.0.0.7:30000')
})

t.test('engines of the same model can load from each other, whatever their ranks', async t => {
  t.equal(loadRefusal(own, peer), undefined)
  t.equal(tableDigest(buildModelTable(arch, 2)), tensors, 'checkpoint tensors do not depend on ranks')
  t.equal(loadRefusal(own, { ...peer, tp_size: 8, device: 'cuda' }), undefined)
})

t.test('a refusal contains both values', async t => {
  t.match(
    loadRefusal(own, { ...peer, model: { ...model, rms_norm_eps: 1e-5 } }),
    /another model: rms_norm_eps is 0.00001 there and 0.000001 here/
  )
  t.match(loadRefusal(own, { ...peer, model: { ...model, extra: true } }), /extra is true there and undefined here/)
  t.match(loadRefusal(own, { ...peer, dtype: 'float32' }), /float32, this engine in bfloat16.*use --dtype float32/)
  t.match(loadRefusal(own, { ...peer, tensors: 'x' }), /other checkpoint tensors/)
  t.match(loadRefusal(own, { ...peer, protocol: 9 }), /protocol 9 .*\(refit 1\)/)
})

t.test('a model description contains exactly the fields that change what the weights compute', async t => {
  t.equal(
    modelDifference(model, describeModel({ ...arch, contextLength: 1, eosTokenIds: [], dtype: 'float32' })),
    undefined
  )
  t.match(
    modelDifference(
      model,
      describeModel({
        ...arch,
        ropeInvFreq: arch.ropeInvFreq.map(f => f * (1 + 1e-12))
      })
    ),
    { field: 'rope' }
  )
  for (
    const field of [
      'hiddenSize',
      'layers',
      'heads',
      'kvHeads',
      'headDim',
      'intermediateSize',
      'vocabSize',
      'rmsNormEps'
    ] as const
  ) {
    t.ok(modelDifference(model, describeModel({ ...arch, [field]: arch[field] + 1 })), field)
  }
  t.ok(modelDifference(model, describeModel({ ...arch, qkNorm: arch.qkNorm === 'none' ? 'head' : 'none' })), 'qkNorm')
  t.ok(modelDifference(model, describeModel({ ...arch, activation: 'gelu_pytorch_tanh' })), 'activation')
  for (const field of ['tieWordEmbeddings', 'qkvBias', 'oBias'] as const) {
    t.ok(modelDifference(model, describeModel({ ...arch, [field]: !arch[field] })), field)
  }
})

t.test('the route depends on devices and ranks: NCCL between GPUs, parameters for equal ranks and memory', async t => {
  const on = (device: string, gpus: string[] = [], ranks = 1): Pick<Receiver, 'device' | 'gpus' | 'ranks'> => ({
    device,
    gpus,
    ranks
  })
  const route = (a: ReturnType<typeof on>, b: ReturnType<typeof on>): string => {
    const { backend, layout } = chooseRoute({ ...own, ...a }, {
      ...peer,
      device: b.device,
      cards: [...b.gpus],
      tp_size: b.ranks
    })
    return `${backend} ${layout}`
  }
  t.equal(route(on('cpu'), on('cpu')), 'gloo parameters')
  t.equal(route(on('cpu', [], 2), on('cpu')), 'gloo checkpoint')
  t.equal(route(on('cpu'), on('cpu', [], 2)), 'gloo checkpoint')
  t.equal(route(on('cuda', ['A']), on('cuda', ['B', 'C'], 2)), 'nccl checkpoint')
  t.equal(route(on('cuda', ['A']), on('cuda', ['B'])), 'nccl parameters')
  t.equal(route(on('cuda', ['A', 'B'], 2), on('cuda', ['C'])), 'nccl checkpoint')
  t.equal(route(on('cuda', ['A']), on('cuda', ['A'])), 'gloo checkpoint', 'NCCL refuses one GPU twice')
  t.equal(route(on('cpu'), on('cuda', ['A'])), 'gloo checkpoint')
  const gathers = layoutDigest(buildModelTable(arch, 2, undefined, null, true))
  t.not(gathers, layoutDigest(buildModelTable(arch, 2)), 'deterministic ranks hold other parts')
  t.match(
    chooseRoute({ ...own, ranks: 2, parameters: gathers }, { ...peer, tp_size: 2 }),
    { layout: 'checkpoint' },
    'although there are as many ranks'
  )
  t.match(
    chooseRoute({ ...own, ...on('cuda', ['A']) }, { ...peer, device: 'cuda', cards: ['A'] }).why,
    /both engines use GPU A/
  )
})
