import { byId, bytes, count, h, keepList, plural } from './dom.js'

/** The transaction that is open, process groups and adapters. */
export function drawFacts (detail) {
  drawTransaction(detail?.transaction ?? null)
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
