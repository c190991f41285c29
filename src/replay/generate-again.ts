import { ClientError } from '../client/client-error.ts'
import type { RefitClient } from '../client/client.ts'
import { RefitError } from '../errors.ts'
import type { Receipt } from '../http/samples/receipt.ts'

/** Generates a receipt's sample on a server. Returns the receipt of the repetition; throws if it cannot be repeated. */
export async function generateAgain (client: RefitClient, receipt: Receipt): Promise<Receipt> {
  const reason = whyUnrepeatable(receipt)
  if (reason !== null) throw new RefitError('UNSUPPORTED', `this sample cannot be repeated: ${reason}`)
  const { finish_reason: finish, lora, output_ids: ids, sampling_params: sampling } = receipt
  const output = await client.generate({
    input_ids: receipt.prompt_ids,
    sampling_params: {
      ...sampling as object,
      n: 1,
      // An aborted sample ended with the tokens that it had.
      ...finish.type === 'abort' ? { max_new_tokens: ids.length } : {}
    },
    return_logprob: receipt.logprobs !== null,
    return_raw_logprobs: receipt.raw_logprobs,
    ...lora === null ? {} : { lora_path: lora.name },
    receipt: true
  })
  if (Array.isArray(output)) throw new ClientError('expected one sample, got several', 200, undefined, output)
  return await client.receipt(output.meta_info.id) as unknown as Receipt
}

function whyUnrepeatable ({ unrepeatable, weight_versions: spans }: Receipt): string | null {
  if (unrepeatable.length > 0) return `/generate has no fields for ${unrepeatable.join(', ')}`
  if (spans.length > 1) return `${spans.length} weight versions made its tokens`
  return null
}
