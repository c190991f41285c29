import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { openApiDocument } from '../src/openapi.ts'
import { packageRoot } from '../src/root.ts'

// Writes openapi/openapi.json from the schemas of the routes. Run after `npm run build:ts`: `npm run openapi`.

const path = join(packageRoot, 'openapi', 'openapi.json')
writeFileSync(path, JSON.stringify(await openApiDocument(), null, 2) + '\n')
console.log(path)
