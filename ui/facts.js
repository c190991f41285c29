import { byId, bytes, count, h, keepList, plural, setText } from './dom.js'

/** The transaction that is open, process groups, adapters and the truth meter. */
export function drawFacts (detail) {
  drawTransaction(detail?.transaction ?? null)
  drawTruth(detail?.truth ?? null)
  const groups = detail?.groups ?? []
  drawList(byId('groups'), groups, 'Not in a process group.', group =>
    h(
      'li',
      {},
      h(
        'span',
        { class: 'cut' },
        group.name,
        h('span', { class: 'dim' }, ` ${group.backend}, ranks ${range(group.ranks)} of ${group.world_size}`)
      ),
      h('span', { class: 'dim' }, group.state),
      group.error === null ? null : h('span', { class: 'wide' }, group.error)
    ))
  const adapters = detail?.adapters ?? []
  drawList(
    byId('adapters'),
    adapters,
    detail?.adapters === null ? 'Adapters are off (--enable-lora).' : 'No adapter is loaded.',
    ({ name, version, rank, resident, pinned, requests }) =>
      h(
        'li',
        {},
        h('span', { class: 'cut' }, name, h('span', { class: 'dim' }, ` version ${version}, rank ${rank}`)),
        h(
          'span',
          { class: 'dim' },
          requests > 0 ? plural(requests, 'request') : pinned ? 'pinned' : resident ? 'in a slot' : 'in memory'
        )
      )
  )
}

function drawTransaction (transaction) {
  const box = byId('transaction')
  const stamp = JSON.stringify(transaction)
  if (box.stamp === stamp) return
  box.stamp = stamp
  if (transaction === null) return box.replaceChildren(h('p', { class: 'empty' }, 'None is open.'))
  const { owner, writing, version, writes, bytes: size, written, expected, failed, seconds_left: left } = transaction
  const row = (name, value) => h('li', {}, h('span', { class: 'dim' }, name), h('span', { class: 'cut' }, value))
  box.replaceChildren(
    h(
      'ul',
      { class: 'rows facts' },
      row('owner', owner),
      row('generation', writing ? 'stopped' : 'goes on'),
      row(
        'written',
        `${count(written)}${expected === null ? '' : ` of ${count(expected)}`} tensors, ${plural(writes, 'write')}, ${
          bytes(size)
        }`
      ),
      version === null ? null : row('version', version),
      failed > 0 ? row('failed', `${count(failed)} tensors`) : null,
      row('ends by itself in', `${Math.round(left)} s`)
    )
  )
}

/** How far a trainer's logprobs are from the engine's, by weight version, the newest first. */
function drawTruth (truth) {
  const texts = truth === null ? [] : [
    plural(truth.samples, 'sample'),
    ...truth.warnings > 0 ? [`${plural(truth.warnings, 'report')} above --truth-warn ${truth.warn}`] : []
  ]
  setText(byId('truth-note'), texts.join(', '))
  const versions = (truth?.versions ?? []).map(one => ({ ...one, name: one.version, warn: truth.warn }))
  drawList(byId('truth'), versions, 'No trainer has sent logprobs (POST /truth).', one =>
    h(
      'li',
      {},
      h(
        'span',
        { class: 'cut', title: one.name },
        one.name,
        h('span', { class: 'dim' }, ` ${plural(one.tokens, 'token')}`)
      ),
      h('span', { class: 'dim' }, `mean ${nats(one.mean)}, max ${nats(one.max)}`),
      h('span', { class: 'dim under' }, `KL ${nats(one.kl)}, clipped ${(100 * one.clipped).toFixed(1)} %`),
      one.warn !== null && one.mean > one.warn ? h('span', { class: 'wide' }, 'far from the engine') : null
    ))
}

/** Two digits that matter, however small. */
function nats (value) {
  return value === 0 ? '0' : value < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(2)))
}

function drawList (list, items, empty, make) {
  keepList(list, items.length === 0 ? [null] : items, {
    key: item => item?.name ?? '',
    stamp: item => item === null ? empty : JSON.stringify(item),
    make: item => item === null ? h('li', {}, h('span', { class: 'dim' }, empty)) : make(item)
  })
}

function range (ranks) {
  return ranks.length > 1 ? `${ranks[0]}–${ranks.at(-1)}` : String(ranks[0] ?? '–')
}
