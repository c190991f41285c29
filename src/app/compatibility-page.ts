import { REFUSED } from '../dialects/refused.ts'

/** The text of docs/compatibility.md. `npm run docs` writes it and a test compares it. */
export function compatibilityPage (): string {
  const rows = REFUSED.map(({ owner, routes, reason }) =>
    `| ${routes.map(route => `\`${route}\``).join(', ')} | ${owner === 'both' ? 'vLLM, SGLang' : owner} | ${reason} |\n`
  )
  return `# Compatibility

<!-- Written by "npm run docs" from src/dialects/refused.ts: change it there. -->

refit serves every route of vLLM's and SGLang's servers except the ones in this table; those that it serves are in
\`openapi/openapi.json\`. \`npm run test:trainers\` reads the routes out of the released packages
(test/trainers/wheels.json) and fails for one that is in neither; with \`-- --newest\` it reads their newest releases. A
route in the table answers 400 with its reason. The fields of a route that are refused are on the page of its owner:
[vllm.md](vllm.md), [trainers](trainers/README.md).

| routes | of | reason |
|---|---|---|
${rows.join('')}`
}
