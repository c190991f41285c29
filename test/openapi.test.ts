import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { gatewayApiDocument } from '../src/app/gateway-server.ts'
import { fieldsPage } from '../scripts/fields-page.ts'
import { openApiDocument } from '../src/app/openapi.ts'
import { packageRoot } from '../src/root.ts'

interface Operation {
  operationId: string
  summary?: string
  tags: string[]
  security: object[]
  responses: Record<string, { description: string }>
  requestBody?: { content: object }
}

const document = JSON.parse(JSON.stringify(await openApiDocument()))
const operations = Object
  .entries(document.paths as Record<string, Record<string, Operation>>)
  .flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ name: `${method} ${path}`, ...operation }))
  )

t.test('openapi/openapi.json matches the routes', async t => {
  const written = JSON.parse(readFileSync(join(packageRoot, 'openapi', 'openapi.json'), 'utf8'))
  t.same(written, document, 'else: npm run build:ts && npm run openapi')
})

t.test('docs/fields.md lists the accepted and refused fields of the routes', async t => {
  const written = readFileSync(join(packageRoot, 'docs', 'fields.md'), 'utf8')
  t.equal(written, fieldsPage(document), 'else: npm run build:ts && npm run docs')
})

t.test('openapi/gateway.json matches the routes of the gateway', async t => {
  const written = JSON.parse(readFileSync(join(packageRoot, 'openapi', 'gateway.json'), 'utf8'))
  t.same(written, JSON.parse(JSON.stringify(await gatewayApiDocument())), 'else: npm run build:ts && npm run openapi')
})

t.test('every operation has an id of its own, a summary, a known tag, its security and a refusal', async t => {
  const tags = document.tags.map((tag: { name: string }) => tag.name)
  t.equal(new Set(operations.map(operation => operation.operationId)).size, operations.length)
  for (const { name, operationId, summary, tags: own, security, responses } of operations) {
    t.match(operationId, /^[a-z][A-Za-z0-9]+$/, name)
    t.ok(summary, name)
    t.ok(own.length === 1 && tags.includes(own[0]), name)
    t.ok(Array.isArray(security), name)
    t.ok(responses['4XX'], name)
    t.ok(
      Object.values(responses).every(response => response.description !== 'Default Response'),
      `${name} describes its replies`
    )
  }
})

t.test('the document is OpenAPI 3.1 with licence, server and key', async t => {
  t.match(document, {
    openapi: '3.1.0',
    info: { title: 'refit', license: { name: 'Apache-2.0' } },
    servers: [{ url: /^http/ }],
    components: { securitySchemes: { key: { type: 'http', scheme: 'bearer' } } }
  })
})
