import { byId, bytes, count, h, milliseconds, plural, setText, short } from './dom.js'
import { kvPart, quantile } from './model.js'

const SHOWN = 8

/** The header, the notice and the tiles. */
export function drawState (model) {
  const { state, server, kind } = model
  const pill = byId('status')
  pill.dataset.state = state.status
  setText(pill, statusText(state))
  setText(byId('model'), server.model ?? '')
  document.title = `${state.weight_version ?? 'refit'} · ${state.status} · refit`
  drawNotice(state)
  drawTiles(model)
  setText(byId('server'), footer(server, kind))
}

function statusText ({ status, weights, paused }) {
  if (status === 'torn') return `torn (${count(weights.torn_count)})`
  if (status === 'paused') return `paused (${paused})`
  if (status === 'asleep') return `asleep (${weights.tags.join(', ')})`
  return status === 'ok' ? 'current' : status
}

/** Names the tensors or the memory that stop generation. */
function drawNotice ({ status, weights, released_memory: released }) {
  const box = byId('notice')
  const stamp = JSON.stringify([status, status === 'torn' || status === 'asleep' ? weights : null])
  if (box.stamp === stamp) return
  box.stamp = stamp
  box.hidden = status !== 'torn' && status !== 'asleep'
  box.dataset.kind = status === 'torn' ? 'bad' : 'warn'
  if (status === 'torn') {
    const { tensors, torn_count: torn, reason } = weights
    const names = tensors.slice(0, SHOWN).join(', ') + (torn > SHOWN ? ` and ${count(torn - SHOWN)} more` : '')
    box.replaceChildren(
      h('b', {}, `${plural(torn, 'tensor')} torn: `),
      `${names}. `,
      `Reason: ${reason}. `,
      'Nothing is generated until an update has written them again.'
    )
  } else if (status === 'asleep') {
    const kinds = Object.entries(released).map(([kind, size]) => `${kind} ${bytes(size)}`).join(', ')
    box.replaceChildren(h('b', {}, 'Asleep: '), `memory is released (${kinds}). Requests wait for its resume.`)
  }
}

function drawTiles (model) {
  const { state, edges, kind } = model
  const counts = model.latency
  const detail = model.detail
  const engines = kind === 'gateway' ? state.engines : null
  const p99 = counts === null ? null : quantile(counts, edges, 0.99)
  const rows = [
    [
      'Version',
      state.weight_version ?? '–',
      engines === null ? `epoch ${count(state.epoch)}` : plural(engines.length, 'engine'),
      'label'
    ],
    [
      'Tokens per second',
      short(state.tokens_per_second),
      detail === null || engines !== null ? '' : `${count(state.generation_tokens)} in all`
    ],
    ['Running', count(state.running), versionsText(detail)],
    ['Waiting', count(state.queued), state.retractions > 0 ? plural(state.retractions, 'retraction') : ''],
    [
      'KV cache',
      `${(100 * kvPart(state)).toFixed(kvPart(state) < 0.1 ? 1 : 0)} %`,
      `of ${count(state.kv.total)} tokens`
    ],
    [
      'Step',
      engines === null ? milliseconds(state.step_ms) : '–',
      p99 === null ? '' : `p99 between tokens ${milliseconds(p99)}`
    ]
  ]
  const tiles = byId('tiles')
  if (tiles.children.length === 0) {
    tiles.append(
      ...rows.map(([title, , , classes]) =>
        h('div', { class: 'tile' }, h('dt', {}, title), h('dd', { class: classes }), h('dd', { class: 'sub' }))
      )
    )
  }
  for (const [i, [, value, sub]] of rows.entries()) {
    const [, main, small] = tiles.children[i].children
    setText(main, value)
    main.title = value
    setText(small, sub)
  }
}

function versionsText (detail) {
  const versions = detail?.versions?.length ?? 0
  return versions > 1 ? `on ${versions} versions` : ''
}

function footer (server, kind) {
  if (kind === 'gateway') return `refit ${server.version} gateway`
  const {
    version,
    architecture,
    device,
    gpus,
    isa,
    ranks,
    threads,
    dtype,
    weight_bytes: size,
    kv_tokens: kv,
    context_length: context
  } = server
  const place = gpus.length > 0 ? gpus.join(', ') : `${device} (${isa}, ${plural(threads, 'thread')})`
  return `refit ${version} · ${architecture} · ${dtype} on ${place} · ${plural(ranks, 'rank')} · ${
    bytes(size)
  } of weights · ` +
    `KV cache for ${count(kv)} tokens · context ${count(context)}`
}
