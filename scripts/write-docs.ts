import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { configurationPage } from '../src/config/configuration-page.ts'
import { packageRoot } from '../src/root.ts'

// npm run docs: writes the pages that are made from tables of the program. A test fails where they differ.

writeFileSync(join(packageRoot, 'docs', 'configuration.md'), configurationPage())
