import { byId, count, h, keepList, plural, setText } from './dom.js'
import { colourOf } from './versions.js'

/** The versions of running requests, and the requests. */
export function drawRunning (detail) {
  const versions = detail?.versions ?? []
  const requests = detail?.requests ?? []
  const total = versions.reduce((sum, [, number]) => sum + number, 0)
  setText(
    byId('running-note'),
    detail === null ? 'no details of this engine' : total === 0 ? 'none' : plural(total, 'request')
  )
  const stack = byId('versions')
  stack.setAttribute(
    'aria-label',
    total === 0 ? 'No request runs' : versions.map(([name, number]) => `${number} on version ${name}`).join(', ')
  )
  keepList(stack, versions, {
    key: ([name]) => name,
    stamp: ([name, number]) => `${name} ${number} ${total}`,
    make: ([name, number]) => {
      const part = h('i', { 'data-v': colourOf(name), title: `${name}: ${number}` })
      part.style.width = `${100 * number / total}%`
      return part
    }
  })
  drawKey(byId('versions-key'), versions)
  keepList(byId('requests'), requests, {
    key: ({ id }) => id,
    stamp: request => JSON.stringify(request),
    make: ({ id, version, versions, tokens, seconds, adapter, prompt, text }) =>
      h(
        'li',
        {},
        h('span', { class: 'cut', title: id }, id),
        h(
          'span',
          { class: 'cut', title: version },
          versions > 1 ? `${version} (${versions} versions)` : version,
          adapter === null ? null : ` · ${adapter}`
        ),
        h('span', { class: 'num' }, plural(tokens, 'token')),
        h('span', { class: 'num dim' }, `${seconds.toFixed(1)} s`),
        prompt === undefined ? null : h('span', { class: 'says cut' }, h('span', { class: 'dim' }, prompt), ` ${text}`)
      )
  })
}

export function drawKey (list, versions) {
  keepList(list, versions, {
    key: ([name]) => name,
    stamp: ([name, number]) => `${name} ${number}`,
    make: ([name, number]) =>
      h('li', { 'data-v': colourOf(name) }, `${name} `, h('span', { class: 'dim' }, count(number)))
  })
}
