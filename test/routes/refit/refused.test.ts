import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { compatibilityPage } from '../../../src/app/compatibility-page.ts'
import { eachRoute, REFUSED } from '../../../src/dialects/refused.ts'
import { packageRoot } from '../../../src/root.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

t.test('every route of the table is refused with its reason, whatever its body is', async t => {
  const { url } = await routeApp(t)
  for (const entry of REFUSED) {
    for (const { method, path } of eachRoute(entry)) {
      const body = method === 'GET' ? {} : { body: 'no JSON', headers: { 'content-type': 'multipart/form-data' } }
      const { status, json } = await call(url + path.replace(/\{\w+\}/, 'x'), undefined, { method, ...body })
      t.equal(status, 400, `${method} ${path}`)
      t.match(JSON.stringify(json), `${path} is not served: ${entry.reason}`)
    }
  }
})

t.test('docs/compatibility.md is the page of the table', async t => {
  t.equal(readFileSync(join(packageRoot, 'docs', 'compatibility.md'), 'utf8'), compatibilityPage())
})
