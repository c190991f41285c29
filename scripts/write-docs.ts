import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { compatibilityPage } from '../src/app/compatibility-page.ts'
import { DIALECT_NAMES } from '../src/app/dialects.ts'
import { openApiDocument } from '../src/app/openapi.ts'
import { configurationPage } from '../src/config/configuration-page.ts'
import { packageRoot } from '../src/root.ts'
import { fieldsPage } from './fields-page.ts'
import { matrixPages, withTable } from './matrix-table.ts'

// npm run docs: writes the parts of pages that come from the program's tables and from results. Tests compare them.

writeFileSync(join(packageRoot, 'docs', 'configuration.md'), configurationPage(DIALECT_NAMES))
writeFileSync(join(packageRoot, 'docs', 'compatibility.md'), compatibilityPage())
writeFileSync(join(packageRoot, 'docs', 'fields.md'), fieldsPage(await openApiDocument()))
for (const [page, table] of Object.entries(matrixPages(packageRoot))) {
  const path = join(packageRoot, page)
  writeFileSync(path, withTable(readFileSync(path, 'utf8'), table))
}
