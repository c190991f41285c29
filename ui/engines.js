import { byId, count, h, keepList, plural, setText, short } from './dom.js'
import { kvPart } from './model.js'

/** The engines behind a gateway; a click shows the details of one. */
export function drawEngines (model, changed) {
  const section = byId('engines-section')
  section.hidden = model.kind !== 'gateway'
  if (section.hidden) return
  const { engines } = model.state
  const shown = engines.find(({ id }) => id === model.chosen) ?? engines.find(({ detail }) => detail !== null)
  setText(
    byId('engines-note'),
    shown === undefined ? plural(engines.length, 'engine') : 'details below: the marked one'
  )
  keepList(byId('engines'), engines, {
    key: ({ id }) => id,
    stamp: engine => JSON.stringify([{ ...engine, detail: brief(engine.detail) }, engine === shown]),
    make: engine =>
      draw(engine, engine === shown, () => {
        model.chosen = engine.id
        changed()
      })
  })
}

function brief (detail) {
  return detail === null ? null : [detail.status, detail.running, detail.queued, detail.tokens_per_second, detail.kv]
}

function draw (
  { url, state, weight_version: version, dialect, reason, detail, detail_error: error, load },
  isShown,
  choose
) {
  const kind = { ready: 'ok', stale: 'degraded', down: 'torn', joining: 'waiting', draining: 'paused' }[state]
  return h(
    'li',
    {},
    h(
      'button',
      { type: 'button', 'aria-pressed': String(isShown), onclick: choose },
      h(
        'span',
        { class: 'cut', title: url },
        url.replace(/^https?:\/\//, ''),
        h('span', { class: 'dim' }, ` ${dialect ?? ''}`)
      ),
      h(
        'span',
        {},
        h('span', { class: 'pill', 'data-state': kind }, detail !== null && state === 'ready' ? textOf(detail) : state)
      ),
      h('span', { class: 'cut', title: version ?? '' }, version ?? '–'),
      h(
        'span',
        { class: 'num' },
        detail === null ? plural(load, 'request') : `${count(detail.running)} + ${count(detail.queued)}`
      ),
      h('span', { class: 'num' }, detail === null ? '' : `${short(detail.tokens_per_second)} tok/s`),
      h('span', { class: 'num dim' }, detail === null ? '' : `KV ${Math.round(100 * kvPart(detail))} %`)
    ),
    reason !== null || error !== null ? h('p', { class: 'why' }, reason ?? `No details: ${error}`) : null
  )
}

function textOf ({ status }) {
  return status === 'ok' ? 'ready' : status
}
