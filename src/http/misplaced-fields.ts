import type { FastifyInstance } from 'fastify'
import { RefitError } from '../errors.ts'
import { guidedFields } from './generation/grammar-fields.ts'
import { otherChatFields, otherGenerateFields, otherOpenAiFields, otherVllmSamplingFields } from './owner-fields.ts'
import { isSet, refuseField } from './refuse.ts'
import { REFUSED } from './schemas.ts'
import type { RefusedField } from './schemas.ts'

// A field of one route that a client sends to another would be ignored, and the client would get other tokens than it
// requested without noticing. So every route that generates refuses by name the fields that another one knows.

/** Fields that change tokens or scores on the routes that have them. Other fields change the form of a reply. */
const HAVE_EFFECT: ReadonlySet<string> = new Set([
  // Which tokens are allowed, and where the output ends
  'allowed_token_ids',
  'bad_words',
  'custom_params',
  'ignore_eos',
  'logit_bias',
  'max_completion_tokens',
  'max_new_tokens',
  'max_output_tokens',
  'max_tokens',
  'min_new_tokens',
  'min_tokens',
  'stop',
  'stop_regex',
  'stop_sequences',
  'stop_token_ids',
  'thinking_budget',
  // How they are sampled
  'beam_width',
  'frequency_penalty',
  'min_p',
  'n',
  'presence_penalty',
  'repetition_penalty',
  'sampling_params',
  'sampling_seed',
  'seed',
  'temperature',
  'top_k',
  'top_p',
  // The prompt
  'content_parts',
  'context_management',
  'conversation',
  'echo',
  'features',
  'images',
  'input_ids',
  'previous_input_messages',
  'previous_response_id',
  'prompt_embeds',
  'required_prefix_token_ids',
  'suffix',
  'truncate_prompt_tokens',
  'truncation',
  // The form of the output
  'ebnf',
  'guided_decoding_regex',
  'json_schema',
  'regex',
  'response_format',
  'structural_tag',
  'structured_outputs',
  'structured_outputs_regex',
  // The weights
  'exact_weight_version',
  'lora_path',
  'min_weight_version',
  'weight_version',
  // Scores
  'logprob_start_len',
  'logprob_token_ids',
  'logprobs',
  'prompt_logprob_start',
  'prompt_logprob_token_ids',
  'prompt_logprobs',
  'return_logprob',
  'return_sampling_mask',
  'sampling_logprobs_mode',
  'token_ids_logprob',
  'token_ids_logprob_positions',
  'top_logprobs',
  'top_logprobs_num'
])

/** Fields that routes refuse. */
const REFUSED_FIELDS: ReadonlyMap<string, RefusedField> = new Map(
  Object
    .entries({
      ...otherVllmSamplingFields,
      ...otherGenerateFields,
      ...otherChatFields,
      ...otherOpenAiFields,
      ...guidedFields
    })
    .flatMap(([name, field]) => {
      const { [REFUSED]: mark } = field as { [REFUSED]?: RefusedField }
      return mark === undefined ? [] : [[name, mark] as const]
    })
)

/** Fields that are objects of sampling parameters. */
const INNER = ['sampling_params', 'generation_kwargs']

interface Schema {
  properties?: Record<string, Schema>
  anyOf?: Schema[]
}

export function refuseMisplacedFields (app: FastifyInstance): void {
  app.addHook('preHandler', async ({ body, routeOptions: { schema, url } }) => {
    const known = (schema?.body as Schema | undefined)?.properties
    const tags = schema?.tags ?? []
    if (known === undefined || !(tags.includes('generation') || tags.includes('openai'))) return
    refuseMisplaced(known, body, `a field of ${url}`, '')
    for (const outer of INNER) {
      const inner = propertiesOf(known[outer])
      if (inner === undefined) continue
      refuseMisplaced(inner, (body as Record<string, unknown>)[outer], `in ${outer}`, `${outer}.`)
    }
  })
}

function refuseMisplaced (known: Record<string, Schema>, body: unknown, where: string, prefix: string): void {
  if (typeof body !== 'object' || body === null) return
  for (const [name, value] of Object.entries(body)) {
    if (Object.hasOwn(known, name)) continue
    const param = prefix + name
    if (HAVE_EFFECT.has(name) && isSet(value)) {
      const inside = INNER.find(outer => propertiesOf(known[outer])?.[name] !== undefined)
      const instead = inside === undefined ? 'leave it out' : `send it in ${inside}`
      throw new RefitError('UNSUPPORTED', `${param}: not ${where}, and it would have no effect; ${instead}`, { param })
    }
    const mark = REFUSED_FIELDS.get(name)
    if (mark !== undefined) refuseField(mark, value, param)
  }
}

/** The fields of a schema that may be a union with null or with lists. */
function propertiesOf (schema: Schema | undefined): Record<string, Schema> | undefined {
  return schema?.properties ?? schema?.anyOf?.find(branch => branch.properties !== undefined)?.properties
}
