import { ask, refusalOf } from './api.js'
import { ago, byId, bytes, clock, count, h, keepList, milliseconds, plural, setText, short } from './dom.js'

const PHASES = {
  announce: 'the source is opened',
  wait: 'earlier updates end',
  plan: 'names and shapes are checked',
  gate: 'the scheduler stops between two steps',
  scatter: 'bytes are written',
  verify: 'the source is checked for changes',
  commit: 'label and caches',
  close: 'references go back',
  failed: 'the step that failed'
}
/** Rows of a timeline; an update of many requests has its sums above them. */
const GANTT_ROWS = 48

const open = new Set()
const list = byId('update-list')
const moments = new Map()

export function startUpdates () {
  byId('phases').append(
    ...Object.entries(PHASES).filter(([phase]) => phase !== 'failed').map(([phase, title]) =>
      h('li', { 'data-phase': phase, title }, phase)
    )
  )
  // Arrow keys go from update to update.
  list.addEventListener('keydown', event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key]
    if (step === undefined || !event.target.matches('button.line')) return
    event.preventDefault()
    const lines = [...list.querySelectorAll('button.line')]
    lines[lines.indexOf(event.target) + step]?.focus()
  })
  setInterval(() => {
    for (const [element, at] of moments) {
      if (element.isConnected) setText(element, ago(Date.now() / 1000 - at))
      else moments.delete(element)
    }
  }, 1000)
}

export function drawUpdates (updates, isGateway) {
  byId('updates-empty').hidden = updates.length > 0
  setText(byId('updates-note'), updates.length === 0 ? '' : plural(updates.length, 'update'))
  keepList(list, updates.length === 0 ? [] : [null, ...updates], {
    key: update => update?.id ?? 'titles',
    stamp: update => update === null ? '' : stampOf(update),
    make: (update, old) => update === null ? titles() : draw(update, isGateway, old)
  })
}

/** Updates that have ended do not change. */
function stampOf ({ id, outcome, requests, bytes, ms, error }) {
  return [id, outcome, requests, bytes, ms.total, error?.code, open.has(id)].join(' ')
}

function titles () {
  const title = (text, classes) => h('span', { class: classes }, text)
  return h(
    'li',
    { 'aria-hidden': 'true' },
    h(
      'div',
      { class: 'line titles' },
      title('outcome', 'outcome'),
      title('when', ''),
      title('sent by', 'who'),
      title('version', 'labels'),
      title('phases', 'bars'),
      title('total', 'num total'),
      title('stall', 'num stall'),
      title('bytes', 'num bytes'),
      title('rate', 'num rate')
    )
  )
}

function draw (update, isGateway, old) {
  const hadFocus = old !== undefined && old.contains(document.activeElement)
  const isOpen = open.has(update.id)
  const line = h(
    'button',
    {
      type: 'button',
      class: 'line',
      'aria-expanded': String(isOpen),
      'aria-label': spoken(update),
      onclick: () => {
        if (!open.delete(update.id)) open.add(update.id)
        const row = line.closest('li')
        const fresh = draw(update, isGateway, row)
        fresh.dataset.key = update.id
        fresh.stamp = stampOf(update)
        row.replaceWith(fresh)
        fresh.querySelector('button.line').focus()
      }
    },
    h('span', { class: 'outcome' }, h('span', { class: 'tag', 'data-outcome': update.outcome }, update.outcome)),
    moment(update),
    h('span', { class: 'cut who', title: sender(update, isGateway) }, sender(update, isGateway)),
    h('span', { class: 'cut labels', title: labels(update) }, labels(update)),
    h('span', { class: 'bars' }, phaseBar(update)),
    h('span', { class: 'num total' }, milliseconds(update.ms.total)),
    h('span', { class: 'num stall' }, milliseconds(update.stall_ms)),
    h('span', { class: 'num bytes' }, update.bytes === 0 ? '–' : bytes(update.bytes)),
    h('span', { class: 'num rate' }, update.gb_per_second === null ? '–' : `${short(update.gb_per_second)} GB/s`)
  )
  if (hadFocus) queueMicrotask(() => line.focus())
  return h('li', {}, line, isOpen ? details(update) : null)
}

function moment ({ started_at: at }) {
  const element = h('span', { class: 'dim cut', title: clock(at) }, ago(Date.now() / 1000 - at))
  moments.set(element, at)
  return element
}

/** The phases as parts of the update's whole time. */
function phaseBar ({ ms }) {
  const phases = Object.keys(PHASES).filter(phase => ms[phase] !== undefined)
  const sum = Math.max(ms.total, phases.reduce((total, phase) => total + ms[phase], 0), 1e-6)
  return h(
    'span',
    { class: 'phasebar', 'aria-hidden': 'true' },
    phases.map(phase => {
      const part = h('i', { 'data-phase': phase, title: `${phase}: ${milliseconds(ms[phase])}` })
      part.style.width = `${100 * ms[phase] / sum}%`
      return part
    })
  )
}

function details (update) {
  const { ms, error, requests, spans } = update
  const fact = (name, value) => value === null || value === '' ? null : h('span', {}, `${name} `, h('b', {}, value))
  const rows = requests === 1
    ? spans
    : Object.keys(PHASES).filter(phase => ms[phase] !== undefined).map(phase => [phase, null, ms[phase]])
  return h(
    'div',
    { class: 'more' },
    error === null ? null : h('p', { class: 'error' }, `${error.code}: ${error.message}`),
    h(
      'div',
      { class: 'facts-list' },
      fact('at', clock(update.started_at)),
      fact('route', update.route),
      fact('from', update.address),
      fact('engine', update.engine ?? null),
      fact('transport', update.transport),
      fact('tensors', update.tensors === 0 ? null : count(update.tensors)),
      fact('requests', requests === 1 ? null : count(requests)),
      fact('transaction', update.transaction),
      fact('adapter', update.adapter),
      fact('paused', update.paused),
      fact('gate shut', update.stall_ms === null ? null : milliseconds(update.stall_ms)),
      fact('id', update.id)
    ),
    h('div', { class: 'gantt' }, rows.slice(0, GANTT_ROWS).flatMap(span => ganttRow(span, ms.total))),
    h(
      'div',
      {},
      h('button', { type: 'button', class: 'quiet', onclick: () => download(update) }, 'Download trace'),
      ' ',
      h('span', { class: 'note' }, "Chrome's format: opens in Perfetto")
    )
  )
}

function ganttRow ([phase, at, ms], total) {
  const bar = h('i', { 'data-phase': phase })
  bar.style.left = `${at === null ? 0 : Math.min(99.5, 100 * at / Math.max(total, 1e-6))}%`
  bar.style.width = `${Math.min(100, 100 * ms / Math.max(total, 1e-6))}%`
  return [
    h('span', {}, phase),
    h('span', { class: 'track', 'data-phase': phase }, bar),
    h('span', { class: 'num' }, milliseconds(ms))
  ]
}

/** The route needs the key, which a link cannot send. */
async function download ({ id }) {
  const reply = await ask(`../updates/${encodeURIComponent(id)}/trace.json`)
  if (!reply.ok) return window.alert(await refusalOf(reply))
  const address = URL.createObjectURL(await reply.blob())
  h('a', { href: address, download: `update-${id}.trace.json` }).click()
  setTimeout(() => URL.revokeObjectURL(address), 1000)
}

function sender ({ dialect, route, adapter, engine, requests }, isGateway) {
  const who = route === null ? 'this process' : `${dialect ?? 'other'} ${route}`
  return [
    isGateway && engine !== undefined ? `${engine.replace(/^https?:\/\//, '')}: ${who}` : who,
    adapter === null ? null : `adapter ${adapter}`,
    requests > 1 ? `${requests} requests` : null
  ]
    .filter(text => text !== null)
    .join(', ')
}

function labels ({ label_before: before, label_after: after, outcome }) {
  return outcome === 'running' || after === before || after === null ? before : `${before} → ${after}`
}

function spoken (update) {
  const { outcome, ms, stall_ms: stall, bytes: size } = update
  return `${outcome}, ${clock(update.started_at)}, ${sender(update, true)}, version ${
    labels(update).replace('→', 'to')
  }, ` +
    `${milliseconds(ms.total)} in all, stall ${milliseconds(stall)}, ${bytes(size)}`
}
