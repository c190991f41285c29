import { ACCEPTED, REFUSED } from '../src/http/schemas.ts'
import type { RefusedField } from '../src/http/schemas.ts'

interface Schema {
  $ref?: string
  description?: string
  properties?: Record<string, Schema>
  anyOf?: Schema[]
  [ACCEPTED]?: boolean
  [REFUSED]?: RefusedField
}

interface Document {
  paths: Record<string, { post?: { requestBody?: { content: Record<string, { schema: Schema }> } } }>
  components: { schemas: Record<string, Schema> }
}

/** The routes that have a table; others have the same fields. */
const ROUTES = ['/generate', '/v1/completions', '/v1/chat/completions', '/inference/v1/generate']

const HEAD = `# Fields of requests

\`npm run docs\` writes this page from the schemas of the routes.

A field that would change tokens is served or refused: no route takes it and ignores it. Each route knows the fields of
the servers that own it, and has them in three classes. They are marked in \`openapi/openapi.json\`:

- served: the rest of the schema;
- accepted (\`x-refit-accepted\`): any value is taken, because the field changes no token and no number of a reply;
- refused (\`x-refit-refused\`): 400 UNSUPPORTED that names the field, unless the value is null, false, empty or one
  that means what refit does anyway.

A field of another route that changes tokens or scores (\`allowed_token_ids\` on \`/generate\`, \`temperature\` beside
\`sampling_params\`) is refused by name. A field that no route has (a typo, or a client's own) is ignored and logged
once for each route; \`sampling_params\` of \`/generate\` and refit's own routes refuse it. \`npm run test:trainers\`
compares the schemas with the released vLLM, SGLang and OpenAI packages, so a field of a new release has to be put into
a class.
`

/** docs/fields.md: the accepted and the refused fields of each generation route. */
export function fieldsPage (document: object): string {
  const { paths, components } = document as Document
  const resolve = (schema: Schema): Schema =>
    schema.$ref === undefined ? schema : components.schemas[schema.$ref.split('/').at(-1)!]!
  const objects = (schema: Schema): Schema[] => {
    const whole = resolve(schema)
    return [...whole.properties === undefined ? [] : [whole], ...(whole.anyOf ?? []).flatMap(objects)]
  }
  const rows = (schema: Schema, prefix: string): string[] =>
    Object.entries(schema.properties ?? {}).flatMap(([name, field]) => {
      const refused = field[REFUSED]
      const { feature = '', instead = '', unless = [] } = refused ?? {}
      const harmless = unless.map(value => `\`${JSON.stringify(value)}\``).join(', ')
      if (refused !== undefined) {
        const notes = [instead, harmless === '' ? '' : `accepted: ${harmless}`].filter(note => note !== '').join('; ')
        return [`| \`${prefix}${name}\` | refused: ${feature} | ${notes} |`]
      }
      if (field[ACCEPTED] === true) return [`| \`${prefix}${name}\` | accepted | ${noteOf(field.description)} |`]
      return objects(field).flatMap(inner => rows(inner, `${prefix}${name}.`))
    })
  const sections = ROUTES.map(route => {
    const { schema } = paths[route]!.post!.requestBody!.content['application/json']!
    return [`## ${route}`, '', '| field | treatment | note |', '|---|---|---|', ...rows(resolve(schema), '')].join('\n')
  })
  return [HEAD, ...sections].join('\n') + '\n'
}

function noteOf (description = ''): string {
  return description === 'Accepted, and has no effect.' ? '' : description
}
