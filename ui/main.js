import { follow, storedKey, storeKey } from './api.js'
import { drawCharts, makeCharts, resizeCharts } from './charts.js'
import { byId, setText } from './dom.js'
import { drawEngines } from './engines.js'
import { drawFacts } from './facts.js'
import { startGenerate } from './generate.js'
import { Model } from './model.js'
import { drawRunning } from './running.js'
import { drawState } from './state.js'
import { startTheme } from './theme.js'
import { drawUpdates, startUpdates } from './updates.js'

const SENDS = 'The page sends it with each of its requests, and forgets it when this tab closes.'

const model = new Model()
let isDue = false

startTheme(() => makeCharts(model))
startUpdates()
startGenerate(model)
makeCharts(model)
new ResizeObserver(() => resizeCharts()).observe(byId('chart-rate'))

const dialog = byId('key-dialog')
/** Resolves when there may be a new key. */
let keyGiven = () => {}
byId('key').addEventListener('click', () => askForKey(SENDS))
byId('key-cancel').addEventListener('click', () => dialog.close())
byId('key-form').addEventListener('submit', event => {
  event.preventDefault()
  storeKey(byId('key-input').value.trim())
  byId('key-input').value = ''
  dialog.close()
})
dialog.addEventListener('close', () => keyGiven())

follow({
  onFrame: (event, data) => {
    if (event === 'hello') model.hello(data)
    else model.take(data)
    schedule()
  },
  onLive: live => {
    byId('live').dataset.live = live ? 'yes' : 'no'
    setText(byId('live'), live ? 'live' : 'reconnecting')
  },
  onKey: async (status, message) => {
    if (status === 403 && storedKey() === null) {
      notice(message)
      await new Promise(resolve => setTimeout(resolve, 5000))
      return
    }
    await new Promise(resolve => {
      keyGiven = resolve
      askForKey(storedKey() === null ? SENDS : 'The server has refused this key. Is it the API key?')
    })
  }
})

function askForKey (text) {
  setText(byId('key-note'), text)
  if (!dialog.open) dialog.showModal()
  byId('key-input').focus()
}

/** Draws once for all that has come since the last picture; a hidden tab draws nothing. */
function schedule () {
  if (isDue) return
  isDue = true
  requestAnimationFrame(() => {
    isDue = false
    drawState(model)
    drawCharts(model)
    drawUpdates(model.list, model.kind === 'gateway')
    drawEngines(model, schedule)
    drawRunning(model.detail)
    drawFacts(model.detail)
  })
}

function notice (text) {
  const box = byId('notice')
  box.hidden = false
  box.dataset.kind = 'bad'
  setText(box, text)
}
