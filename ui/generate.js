import { ask, eventsOf, refusalOf } from './api.js'
import { byId, h, setText } from './dom.js'
import { drawKey } from './running.js'
import { colourOf } from './versions.js'

/** Tokens of the output; more than this is cut off at the front. */
const MOST = 4000
/** Stands for a token that the text leaves out; its title has its name. */
const SPECIAL = '◦'

/** The box that generates: each token has the colour of the version that made it. */
export function startGenerate (model) {
  const form = byId('generate')
  const prompt = byId('prompt')
  let control = null
  form.addEventListener('submit', event => {
    event.preventDefault()
    if (control !== null) return control.abort()
    control = new AbortController()
    setText(byId('go'), 'Stop')
    run(bodyOf(model, prompt.value), prompt.value, control.signal).finally(() => {
      control = null
      setText(byId('go'), 'Generate')
    })
  })
  prompt.addEventListener('keydown', event => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return
    event.preventDefault()
    form.requestSubmit()
  })
}

function bodyOf ({ server }, prompt) {
  const ids = server.takes_text === false ? prompt.split(/[\s,]+/).filter(word => word !== '').map(Number) : null
  return {
    ...ids === null ? { text: prompt } : { input_ids: ids },
    stream: true,
    return_logprob: true,
    return_text_in_logprobs: true,
    sampling_params: {
      max_new_tokens: Number(byId('max-tokens').value),
      temperature: Number(byId('temperature').value),
      ignore_eos: byId('ignore-eos').checked
    }
  }
}

async function run (body, prompt, signal) {
  const output = byId('output')
  output.replaceChildren(h('span', { class: 'prompt' }, prompt))
  byId('output-key').replaceChildren()
  const shown = { text: '', tokens: 0, counts: new Map() }
  try {
    const reply = await ask('../generate', {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body),
      signal
    })
    if (!reply.ok) throw new Error(await refusalOf(reply))
    for await (const { data } of eventsOf(reply)) {
      if (data === null) break
      if (data.error !== undefined) throw new Error(data.error.message ?? data.message ?? 'it broke off')
      append(output, data, shown)
    }
  } catch (error) {
    if (!signal.aborted) output.append(h('span', { class: 'problem' }, ` ${error.message}`))
  }
}

/** `data` has everything so far; what is new is added. */
function append (output, data, shown) {
  const { meta_info: info, output_ids: ids } = data
  const text = data.text ?? ids.join(' ')
  const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8
  const fresh = pieces(text.slice(shown.text.length), ids.slice(shown.tokens), info, shown.tokens)
  for (const { text, title, version, tokens, isSpecial } of fresh) {
    const attributes = { class: isSpecial ? 'token special' : 'token', 'data-v': colourOf(version), title }
    output.append(h('span', attributes, isSpecial ? SPECIAL : text))
    shown.counts.set(version, (shown.counts.get(version) ?? 0) + tokens)
  }
  while (output.children.length > MOST) output.firstChild.remove()
  shown.text = text
  shown.tokens = ids.length
  if (isAtEnd) output.scrollTop = output.scrollHeight
  drawKey(byId('output-key'), [...shown.counts])
}

/**
 * One piece for each token. A token that the text leaves out, such as the end, shows a mark. Tokens that make a
 * character together are one piece.
 */
function pieces (text, ids, info, from) {
  const versionAt = index =>
    info.weight_versions.find(({ start, end }) => index >= start && index < end)?.version ?? info.weight_version
  const scores = ids.length === 0 ? [] : (info.output_token_logprobs ?? []).slice(-ids.length)
  let rest = text
  const found = scores.map(([logprob, id, own], i) => {
    const version = versionAt(from + i)
    const isSpecial = !rest.startsWith(own)
    if (!isSpecial) rest = rest.slice(own.length)
    const title = `version ${version}\ntoken ${id} ${own}\nlogprob ${logprob?.toFixed(3) ?? 'none'}`
    return { text: own, version, tokens: 1, title, isSpecial }
  })
  if (rest === '' && found.length === ids.length) return found
  const version = versionAt(from + Math.max(0, ids.length - 1))
  const title = `version ${version}\ntokens ${ids.join(' ')}`
  return [{ text, version, tokens: ids.length, title, isSpecial: false }]
}
