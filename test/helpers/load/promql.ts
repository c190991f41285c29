import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { parser } from '@prometheus-io/lezer-promql'
import { parse } from 'yaml'
import { packageRoot } from '../../../src/root.ts'

/** One expression of a board or a rule. */
export interface Query {
  from: string
  expression: string
}

/** A metric that a query reads, with the labels that its selector names. */
export interface Selector {
  metric: string
  labels: { name: string, operator: string, value: string }[]
}

export const read = (path: string): string => readFileSync(join(packageRoot, path), 'utf8')

/** The expressions of a board's panels, with Grafana's variables as values. */
export function boardQueries (name: string): Query[] {
  const { panels } = JSON.parse(read(`deploy/grafana/${name}.json`)) as {
    panels: { title: string, targets?: { expr: string }[] }[]
  }
  return panels.flatMap(({ title, targets = [] }) =>
    targets.map(({ expr }) => ({ from: `${name}: ${title}`, expression: expr.replaceAll('$__rate_interval', '5m') }))
  )
}

export interface Rule {
  record?: string
  alert?: string
  expr: string
  labels?: Record<string, string>
  annotations?: Record<string, string>
}

export function rules (): Rule[] {
  const { groups } = parse(read('deploy/prometheus/rules.yml')) as { groups: { rules: Rule[] }[] }
  return groups.flatMap(({ rules }) => rules)
}

/** The places where an expression is no PromQL, by Prometheus's own grammar. */
export function faults (expression: string): string[] {
  const found: string[] = []
  parser.parse(expression).iterate({
    enter: ({ type, from, to }) => {
      if (type.isError) found.push(`at ${from}: ${JSON.stringify(expression.slice(from, to))}`)
    }
  })
  return found
}

export function selectors (expression: string): Selector[] {
  const found: Selector[] = []
  parser.parse(expression).iterate({
    enter: ({ name, node }) => {
      const text = (child: { from: number, to: number } | null): string =>
        child === null ? '' : expression.slice(child.from, child.to)
      if (name === 'VectorSelector') found.push({ metric: text(node.getChild('Identifier')), labels: [] })
      else if (name === 'UnquotedLabelMatcher') {
        found.at(-1)!.labels.push({
          name: text(node.getChild('LabelName')),
          operator: text(node.getChild('MatchOp')),
          value: text(node.getChild('StringLiteral')).slice(1, -1)
        })
      }
    }
  })
  return found
}
