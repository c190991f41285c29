import { byId, setText } from './dom.js'

const STORED = 'refit theme'
const NAMES = { auto: 'Auto', light: 'Light', dark: 'Dark' }
const SPOKEN = { auto: 'automatic', light: 'light', dark: 'dark' }

/** Light or dark, as the system or the reader wants; `changed` is called when the colours have changed. */
export function startTheme (changed) {
  const system = matchMedia('(prefers-color-scheme: dark)')
  let chosen = localStorage.getItem(STORED)
  if (!(chosen in NAMES)) chosen = 'auto'
  const apply = () => {
    document.documentElement.dataset.theme = chosen === 'auto' ? system.matches ? 'dark' : 'light' : chosen
    setText(byId('theme'), NAMES[chosen])
    byId('theme').setAttribute('aria-label', `Colours: ${SPOKEN[chosen]}`)
  }
  apply()
  system.addEventListener('change', () => {
    apply()
    changed()
  })
  byId('theme').addEventListener('click', () => {
    const names = Object.keys(NAMES)
    chosen = names[(names.indexOf(chosen) + 1) % names.length]
    localStorage.setItem(STORED, chosen)
    apply()
    changed()
  })
}
