import t from 'tap'
import { parse, parseAllDocuments } from 'yaml'
import { OPTIONS } from '../../src/config/schema.ts'
import { variableName } from '../../src/config/option.ts'
import { read, rules } from '../helpers/load/promql.ts'

t.test('every alert says what is wrong, and how urgent it is', t => {
  const alerts = rules().filter(({ alert }) => alert !== undefined)
  t.ok(alerts.length >= 10)
  t.equal(new Set(alerts.map(({ alert }) => alert)).size, alerts.length)
  for (const { alert, labels, annotations } of alerts) {
    t.match(labels?.['severity'], /^(critical|warning|info)$/, alert!)
    t.ok(annotations?.['summary'], alert!)
  }
  t.end()
})

t.test('files that compose mounts are there, and Prometheus scrapes the services by their names and ports', t => {
  const compose = parse(read('docker-compose.yml'), { merge: true }) as {
    services: Record<string, { profiles: string[], image?: string, volumes?: string[], ports?: string[] }>
  }
  const { prometheus, grafana } = compose.services
  for (const { profiles, image } of [prometheus!, grafana!]) {
    t.strictSame(profiles, ['monitoring'])
    t.match(image, /:v?\d+\.\d+\.\d+$/, 'a pinned image')
  }
  for (const volume of [...grafana!.volumes!].filter(volume => volume.includes('.json'))) {
    t.ok(JSON.parse(read(volume.split(':')[0]!)).panels.length > 0, volume)
  }
  const scrape = parse(read('deploy/prometheus/prometheus.yml')) as {
    scrape_configs: {
      job_name: string
      dns_sd_configs: { names: string[], port: number }[]
      metrics_path?: string
      metric_relabel_configs?: object[]
    }[]
  }
  const [engines, ranks] = scrape.scrape_configs
  const { paths } = JSON.parse(read('openapi/gateway.json')) as { paths: object }
  t.ok(ranks!.metrics_path! in paths, 'the path where a gateway has the metrics of its engines')
  t.strictSame(ranks!.metric_relabel_configs, [
    { source_labels: ['instance', 'worker_addr'], separator: '/', target_label: 'instance' }
  ])
  const [{ names, port }] = engines!.dns_sd_configs as [{ names: string[], port: number }]
  for (const name of names) t.match(compose.services[name]!.ports![0], new RegExp(`:${port}$`), name)
  const [source] = parse(read('deploy/grafana/provisioning/datasources/prometheus.yml')).datasources
  t.equal(source.url, 'http://prometheus:9090')
  t.end()
})

t.test('the Kubernetes example uses routes, variables and times that refit has', t => {
  const documents = parseAllDocuments(read('deploy/kubernetes/refit.yaml')).map(document => document.toJS())
  const { spec } = documents.find(({ kind }) => kind === 'Deployment').spec.template
  const [container] = spec.containers
  const { paths } = JSON.parse(read('openapi/openapi.json')) as { paths: object }
  for (const probe of ['startupProbe', 'readinessProbe', 'livenessProbe']) {
    const { path, port } = container[probe].httpGet
    t.ok(path in paths, `${probe}: ${path}`)
    t.equal(port, container.ports[0].name)
  }
  const variables = new Map(Object.keys(OPTIONS).map(key => [variableName(key), key]))
  for (const { name } of container.env) t.ok(variables.has(name), name)
  const secrets = container.env.filter(({ valueFrom }: any) => valueFrom !== undefined)
  t.strictSame(secrets.map(({ name }: any) => name), ['REFIT_API_KEY', 'REFIT_ADMIN_API_KEY'])
  const drain = Number(container.env.find(({ name }: any) => name === 'REFIT_SHUTDOWN_TIMEOUT').value)
  const sleep = Number(container.lifecycle.preStop.exec.command[1])
  t.ok(spec.terminationGracePeriodSeconds >= drain + sleep + 5, 'the pod is killed after the drain')
  t.equal(container.resources.limits['nvidia.com/gpu'], container.resources.requests['nvidia.com/gpu'])
  const mounted = container.volumeMounts.map(({ name }: any) => name)
  t.strictSame(spec.volumes.map(({ name }: any) => name), mounted)
  t.end()
})
