import type { Part } from './collect.ts'

export interface ReportDocument {
  /** ISO 8601. */
  date: string
  /** The machine and program that wrote the report. */
  local: Record<string, unknown>
  server: { url: string, parts: Part[] } | null
}

/** The report as text that people read: a heading for each part, then its fields, indented by depth. */
export function reportText ({ date, local, server }: ReportDocument): string {
  const sections = [`refit report, ${date}`, section('where this report was written', local)]
  if (server !== null) {
    sections.push(`server ${server.url}`)
    for (const part of server.parts) {
      sections.push('reply' in part ? section(part.path, part.reply) : `== ${part.path}\n${part.missing}`)
    }
  }
  return sections.join('\n\n') + '\n'
}

function section (name: string, value: unknown): string {
  return `== ${name}\n${lines(value, '').join('\n')}`
}

function lines (value: unknown, indent: string): string[] {
  if (Array.isArray(value)) {
    return value.flatMap(item => {
      if (isScalar(item)) return [`${indent}- ${scalar(item)}`]
      const [first = '', ...rest] = lines(item, indent + '  ')
      return [`${indent}- ${first.trimStart()}`, ...rest]
    })
  }
  if (isScalar(value)) return [indent + scalar(value)]
  return Object.entries(value as object).flatMap(([name, item]) => {
    if (isScalar(item)) return [`${indent}${name}: ${scalar(item)}`]
    return Object.keys(item as object).length === 0
      ? [`${indent}${name}: none`]
      : [`${indent}${name}:`, ...lines(item, indent + '  ')]
  })
}

function isScalar (value: unknown): boolean {
  return typeof value !== 'object' || value === null
}

function scalar (value: unknown): string {
  return typeof value === 'string' ? value.replace(/\s+/g, ' ') : String(value)
}
