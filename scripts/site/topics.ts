interface Page {
  text: string
  link: string
}

const page = (text: string, link: string): Page => ({ text, link })

/** The pages by topic. A test fails if a page of docs/ is missing here. */
export const TOPICS: readonly { text: string, items: Page[] }[] = [
  {
    text: 'Start',
    items: [
      page('What it is', '/'),
      page('Quick start', '/quick-start'),
      page('Configuration', '/configuration'),
      page('Compatibility', '/compatibility'),
      page('Fields', '/fields'),
      page('Changes', '/CHANGELOG')
    ]
  },
  {
    text: 'Trainers',
    items: [
      page('All trainers', '/trainers/'),
      page('A loop of your own', '/trainers/own-loop'),
      page('slime', '/trainers/slime'),
      page('verl', '/trainers/verl'),
      page('SkyRL', '/trainers/skyrl'),
      page('AReaL', '/trainers/areal'),
      page('OpenRLHF', '/trainers/openrlhf'),
      page('prime-rl', '/trainers/prime-rl'),
      page('NeMo-RL', '/trainers/nemo-rl'),
      page('TRL', '/trainers/trl'),
      page('checkpoint-engine', '/trainers/checkpoint-engine'),
      page('Python client', '/clients/python/')
    ]
  },
  {
    text: 'Weights',
    items: [
      page('Updates', '/updates'),
      page('Tensors', '/tensor-updates'),
      page('Process groups', '/groups'),
      page("A trainer's shards", '/shards'),
      page('Uploads', '/uploads'),
      page('Disk deltas', '/disk-deltas'),
      page('checkpoint-engine', '/checkpoint-engine'),
      page('Weight loaders', '/weight-loaders'),
      page('Adapters', '/adapters'),
      page('Checksums', '/checksum'),
      page('Memory', '/memory'),
      page('Conformance', '/conformance')
    ]
  },
  {
    text: 'Generation',
    items: [
      page('vLLM', '/vllm'),
      page('Tools and reasoning', '/tools'),
      page('Agents', '/agents'),
      page('Exact turns', '/exact-turns'),
      page('Structured output', '/structured-output'),
      page('Guesses from siblings', '/speculation'),
      page('Deterministic results', '/deterministic'),
      page('Scores of prompts', '/scoring'),
      page('Sampling masks', '/sampling-masks'),
      page('Routing replay', '/routed-experts'),
      page('Receipts, replay, truth', '/samples')
    ]
  },
  {
    text: 'Operation',
    items: [
      page('Operations', '/operations'),
      page('The page', '/ui'),
      page('Metrics', '/metrics'),
      page('OpenTelemetry', '/telemetry'),
      page('Bench, chat, report', '/bench'),
      page('Gateway', '/gateway'),
      page('Fleet', '/fleet'),
      page('Data parallel', '/data-parallel'),
      page('Security', '/security'),
      page('CUDA', '/cuda'),
      page('GPU probes', '/gpu-probes'),
      page('Performance', '/performance')
    ]
  }
]
