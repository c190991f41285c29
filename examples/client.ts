import { RefitClient } from 'refit'
import type { GenerateOutput } from 'refit'

// A rollout client: generate, stream, replace the weights, pause. In another terminal: npm start
//   node dist/examples/client.js [http://127.0.0.1:30000]

// If the server requires keys: new RefitClient(url, { apiKey, adminApiKey })
const client = new RefitClient(process.argv[2] ?? 'http://127.0.0.1:30000')
const sums = ['123+456=', '787+145=', '999+999=']
const greedy = { temperature: 0, max_new_tokens: 8 }

// A batch returns a list in its order; one prompt returns one output.
async function answers (): Promise<string> {
  const outputs = await client.generate({ text: sums, sampling_params: greedy }) as GenerateOutput[]
  return outputs.map((output, i) => `${sums[i]}${output.text} (weights ${output.meta_info.weight_version})`).join(', ')
}
console.log('base model:   ', await answers())

// Each event contains the whole output so far. Leaving the loop early ends the request on the server.
for await (const { text, output_ids: ids } of client.stream({ text: '305+48=', sampling_params: greedy })) {
  console.log(`stream:        ${ids.length} tokens, ${JSON.stringify(text)}`)
}

// The path is the server's, inside its --model-root. The call returns once all later tokens come from the new weights.
const { report } = await client.updateWeightsFromDisk({ model_path: 'models/adder', weight_version: 'trained' })
console.log(`update:        ${report.tensors} tensors, ${report.bytes} bytes`)
console.log('trained model:', await answers())

// Paused in place: requests are frozen with their KV, and new ones wait. A trainer pauses around its own update.
await client.pause('in_place')
const waiting = answers()
console.log('health:       ', (await client.health()).status)
await client.continue()
console.log('continued:    ', await waiting)

await client.close()
