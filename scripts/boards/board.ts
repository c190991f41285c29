// Grafana's boards as data: rows of panels, each with queries. `toBoard` makes the JSON that Grafana imports.

export interface Panel {
  title: string
  /** Shown behind the panel's "i". */
  help?: string
  /** Grafana's name of the unit. */
  unit?: string
  kind?: 'timeseries' | 'stat' | 'heatmap'
  /** In columns, of which there are 24 (default 8). */
  width?: number
  queries: readonly [expression: string, legend: string][]
}

export interface Board {
  uid: string
  title: string
  description: string
  /** A metric whose `instance` labels can be chosen. */
  instances: string
  rows: readonly { title: string, panels: readonly Panel[] }[]
}

const HEIGHT = 8
// eslint-disable-next-line no-template-curly-in-string -- a variable of Grafana
const SOURCE = { type: 'prometheus', uid: '${datasource}' }

/** The selector of the instances that the reader chose. */
export const CHOSEN = 'instance=~"$instance"'

/** A percentile of a histogram, per instance. */
export function percentile (part: number, histogram: string, more = ''): string {
  const buckets = `rate(${histogram}_bucket{${CHOSEN}${more}}[$__rate_interval])`
  return `histogram_quantile(${part}, sum by (le, instance) (${buckets}))`
}

/** Change per second of a counter, per instance. */
export function perSecond (counter: string, more = ''): string {
  return `sum by (instance) (rate(${counter}{${CHOSEN}${more}}[$__rate_interval]))`
}

export function toBoard (board: Board): object {
  let id = 0
  let y = 0
  const panels: object[] = []
  for (const row of board.rows) {
    panels.push({ id: ++id, type: 'row', title: row.title, collapsed: false, panels: [], gridPos: place(0, y, 24, 1) })
    y += 1
    let x = 0
    for (const panel of row.panels) {
      const width = panel.width ?? 8
      if (x + width > 24) {
        x = 0
        y += HEIGHT
      }
      panels.push(toPanel(panel, ++id, place(x, y, width, HEIGHT)))
      x += width
    }
    y += HEIGHT
  }
  return {
    uid: board.uid,
    title: board.title,
    description: board.description,
    tags: ['refit'],
    schemaVersion: 39,
    version: 1,
    editable: true,
    refresh: '10s',
    time: { from: 'now-1h', to: 'now' },
    timezone: 'browser',
    graphTooltip: 1,
    annotations: { list: [] },
    links: [{ type: 'dashboards', title: 'refit', tags: ['refit'], asDropdown: true, keepTime: true }],
    templating: { list: variables(board) },
    panels
  }
}

function variables ({ instances }: Board): object[] {
  return [
    { name: 'datasource', type: 'datasource', query: 'prometheus', label: 'Source', current: {} },
    {
      name: 'instance',
      type: 'query',
      label: 'Instance',
      datasource: SOURCE,
      query: { query: `label_values(${instances}, instance)`, refId: 'instance' },
      refresh: 2,
      sort: 1,
      multi: true,
      includeAll: true,
      allValue: '.*',
      current: { text: 'All', value: '$__all' }
    }
  ]
}

function place (x: number, y: number, w: number, h: number): object {
  return { x, y, w, h }
}

function toPanel (
  { title, help, unit = 'short', kind = 'timeseries', queries }: Panel,
  id: number,
  gridPos: object
): object {
  const custom = kind === 'timeseries' ? { custom: { lineWidth: 1, fillOpacity: 10, showPoints: 'never' } } : {}
  return {
    id,
    type: kind,
    title,
    ...help === undefined ? {} : { description: help },
    gridPos,
    datasource: SOURCE,
    fieldConfig: { defaults: { unit, min: kind === 'timeseries' ? 0 : undefined, ...custom }, overrides: [] },
    options: kind === 'stat'
      ? { reduceOptions: { calcs: ['lastNotNull'], fields: '', values: false }, colorMode: 'value' }
      : kind === 'heatmap'
      ? { calculate: false, yAxis: { unit }, cellGap: 0 }
      : { legend: { displayMode: 'list', placement: 'bottom' }, tooltip: { mode: 'multi', sort: 'desc' } },
    targets: queries.map(([expr, legendFormat], i) => ({
      refId: String.fromCharCode(65 + i),
      datasource: SOURCE,
      expr,
      legendFormat,
      ...kind === 'heatmap' ? { format: 'heatmap' } : {}
    }))
  }
}
