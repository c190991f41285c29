import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { gatewayApiDocument } from '../src/app/gateway-server.ts'
import { openApiDocument } from '../src/app/openapi.ts'
import { packageRoot } from '../src/root.ts'

// Writes openapi/openapi.json from the schemas of the routes. Run after `npm run build:ts`: `npm run openapi`.

for (
  const [name, document] of [['openapi', await openApiDocument()], ['gateway', await gatewayApiDocument()]] as const
) {
  const path = join(packageRoot, 'openapi', `${name}.json`)
  writeFileSync(path, JSON.stringify(document, null, 2) + '\n')
  console.log(path)
}
