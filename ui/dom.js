// Small helpers: elements, numbers as text.

export const byId = id => document.getElementById(id)

/** An element. Attributes that are null are left out; children may be texts, elements, or lists of them. */
export function h (name, attributes = {}, ...children) {
  const element = document.createElement(name)
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value)
    else element.setAttribute(key, value === true ? '' : value)
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined))
  return element
}

/** Changes a text only if it differs, so that screen readers and selections are left alone. */
export function setText (element, text) {
  if (element.textContent !== text) element.textContent = text
}

/**
 * Keeps the children of a list in the order of `items`. `key` names an item, `stamp` is equal while it looks the same,
 * and `make` draws it. Elements of items that have not changed stay.
 */
export function keepList (parent, items, { key, stamp, make }) {
  const known = new Map([...parent.children].map(child => [child.dataset.key, child]))
  let before = null
  for (const item of items) {
    const id = String(key(item))
    const mark = stamp(item)
    let element = known.get(id)
    if (element === undefined || element.stamp !== mark) {
      const fresh = make(item, element)
      fresh.dataset.key = id
      fresh.stamp = mark
      if (element !== undefined && element !== fresh) element.replaceWith(fresh)
      element = fresh
    }
    known.delete(id)
    const place = before === null ? parent.firstChild : before.nextSibling
    if (place !== element) parent.insertBefore(element, place)
    before = element
  }
  for (const element of known.values()) element.remove()
}

export function count (value) {
  return Math.round(value).toLocaleString('en-US')
}

/** `1,234`, `12.3`, `0.42`: three digits that matter. */
export function short (value) {
  if (value >= 100) return count(value)
  if (value >= 10) return value.toFixed(1)
  return value === 0 ? '0' : value.toFixed(2)
}

export function bytes (value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let i = 0
  while (value >= 1000 && i < units.length - 1) {
    value /= 1000
    i++
  }
  return `${i === 0 ? value : short(value)} ${units[i]}`
}

export function milliseconds (ms) {
  if (ms === null || ms === undefined) return '–'
  if (ms >= 60_000) return `${(ms / 60_000).toFixed(1)} min`
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`
}

export function ago (seconds) {
  if (seconds < 1) return 'now'
  if (seconds < 60) return `${Math.floor(seconds)} s ago`
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`
  return seconds < 86_400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86_400)} d ago`
}

export function clock (seconds) {
  return new Date(seconds * 1000).toLocaleTimeString('en-GB')
}

export function plural (number, word) {
  return `${count(number)} ${word}${number === 1 ? '' : 's'}`
}
