import type { Mutant } from './mutant.ts'

export const gateway: readonly Mutant[] = [
  {
    why: 'an engine that restarted under the same label goes unnoticed',
    file: 'src/gateway/health.ts',
    before: 'if (now.instance !== facts!.instance) {',
    after: 'if (now.version !== facts!.version) {',
    tests: ['test/gateway/workers.test.ts']
  },
  {
    why: 'an engine without checksums counts as current after it missed updates',
    file: 'src/gateway/admission.ts',
    before: 'return fleet.updates === 0 || (worker.update === fleet.updates && fleet.isOnDisk)',
    after: 'return fleet.updates === 0 || fleet.isOnDisk',
    tests: ['test/gateway/catch-up.test.ts', 'test/gateway/faults-of-updates.test.ts']
  },
  {
    why: 'an engine is admitted although an update came meanwhile',
    file: 'src/gateway/admission.ts',
    before: 'const isUnchanged = (): boolean => fleet.isQuiet && fleet.updates === updates',
    after: 'const isUnchanged = (): boolean => fleet.isQuiet',
    tests: [
      'test/gateway/catch-up.test.ts',
      'test/gateway/faults-of-updates.test.ts',
      'test/gateway/workers.test.ts',
      'test/gateway/direct-updates.test.ts'
    ]
  },
  {
    why: 'an engine that missed an update stays in rotation',
    file: 'src/gateway/fleet.ts',
    before: `        this.missed(worker, outcome?.failure ?? 'the update was not sent to it')
`,
    after: `        void outcome
`,
    tests: ['test/gateway/updates.test.ts', 'test/gateway/announcements.test.ts']
  },
  {
    why: 'an engine whose reply was lost generates on',
    file: 'src/gateway/fleet.ts',
    before: `        worker.inSync = false
        if (worker.state`,
    after: '        if (worker.refusal !== null && worker.state',
    tests: ['test/gateway/faults-of-updates.test.ts']
  },
  {
    why: 'a restarted engine keeps its announcements',
    file: 'src/gateway/announcements.ts',
    before: 'for (const set of bodies.values()) set.delete(worker)',
    after: 'for (const set of bodies.values()) if (set.size > 1) set.add(worker)',
    tests: ['test/gateway/announcements.test.ts']
  },
  {
    why: 'an engine that missed one of two announcements counts as complete',
    file: 'src/gateway/announcements.ts',
    before: 'takers.some(set => !set.has(worker))',
    after: 'takers.every(set => !set.has(worker))',
    tests: ['test/gateway/announcements.test.ts']
  },
  {
    why: 'replies of engines that disagree are merged',
    file: 'src/gateway/replies.ts',
    before: 'if (new Set(values).size === 1) return',
    after: 'if (new Set(values).size >= 1) return',
    tests: ['test/gateway/replies.test.ts']
  },
  {
    why: 'a success of one engine hides the failure of another',
    file: 'src/gateway/replies.ts',
    before: 'if (failed.length > 0) return refusal(outcomes, failed)',
    after: 'if (failed.length === outcomes.length) return refusal(outcomes, failed)',
    tests: ['test/gateway/replies.test.ts']
  },
  {
    why: 'all engines of a group get the rank of the first',
    file: 'src/gateway/bodies.ts',
    before: `    rank += worker.ranks
    return [worker, body.with([edit])]
  }))
}

/** Gives each`,
    after: `    return [worker, body.with([edit])]
  }))
}

/** Gives each`,
    tests: ['test/gateway/routes.test.ts', 'test/gateway/dialects.test.ts']
  },
  {
    why: 'handles of the second engine are those of the first',
    file: 'src/gateway/bodies.ts',
    before: `const edit: Edit = { at, value: body.slice(at, rank, worker.ranks) }
    rank += worker.ranks`,
    after: 'const edit: Edit = { at, value: body.slice(at, rank, worker.ranks) }',
    tests: ['test/gateway/routes.test.ts']
  },
  {
    why: 'an equal member of a body is taken from its first place',
    file: 'src/gateway/json-body.ts',
    before: '    members.set(name, { begin: at, end })',
    after: '    if (!members.has(name)) members.set(name, { begin: at, end })',
    tests: ['test/gateway/json-body.test.ts']
  },
  {
    why: 'a request with a started reply is tried on another engine',
    file: 'src/gateway/pass-to-one.ts',
    before: `        if (raw.headersSent) return reply
`,
    after: '',
    tests: ['test/gateway/faults.test.ts']
  },
  {
    why: 'a torn engine gets the next request, too',
    file: 'src/gateway/pass-to-one.ts',
    before: 'if (code !== undefined) health.refused(worker',
    after: "if (code === '') health.refused(worker",
    tests: ['test/gateway/direct-updates.test.ts', 'test/gateway/faults.test.ts']
  },
  {
    why: 'the load of a failed request is never taken back',
    file: 'src/gateway/pass-to-one.ts',
    before: `      } finally {
        worker.load--
      }`,
    after: `      } finally {
        if (failure === undefined) worker.load--
      }`,
    tests: ['test/gateway/faults.test.ts']
  },
  {
    why: 'prefixes stay on an engine however busy it is',
    file: 'src/gateway/balance.ts',
    before: 'if (score > bestScore && one.load < limit) {',
    after: 'if (score > bestScore) {',
    tests: ['test/gateway/balance.test.ts']
  },
  {
    why: 'a pause that one engine missed is not ended there',
    file: 'src/gateway/call-engines.ts',
    before: "if (worker.isPaused) fleet.unready(worker, 'stale', 'it missed the end of a pause')",
    after: 'if (!worker.isPaused) continue',
    tests: ['test/gateway/faults-of-updates.test.ts']
  },
  {
    why: 'an adapter that was unloaded while an engine joined stays there',
    file: 'src/gateway/adapters.ts',
    before: '        await unload(worker, name)\n        // A version',
    after: '        // A version',
    tests: ['test/gateway/adapter-joins.test.ts']
  },
  {
    why: 'a transaction of which an engine missed a part stays open there after its end',
    file: 'src/gateway/open-transactions.ts',
    before: 'if (open == null || !isMeant(open)) return',
    after: 'if (open == null || !isMeant(open) || /missed/.test(reason)) return',
    tests: ['test/gateway/finish-old.test.ts']
  },
  {
    why: 'a transaction that one engine refused stays open on the others',
    file: 'src/gateway/call-engines.ts',
    before: ') await abortBegun(outcomes, request.headers.authorization)',
    after: ') void abortBegun([], request.headers.authorization)',
    tests: ['test/gateway/life.test.ts']
  },
  {
    why: 'a body is sent at the speed of the fastest engine',
    file: 'src/gateway/fan-out.ts',
    before: 'await Promise.all(live.filter(pipe => !pipe.write(chunk)).map(drained))',
    after: 'await Promise.race(live.map(async pipe => { if (!pipe.write(chunk)) await drained(pipe) }))',
    tests: ['test/gateway/updates.test.ts', 'test/gateway/faults-of-updates.test.ts']
  },
  {
    why: 'checksums of another order count as other weights',
    file: 'src/gateway/compare-checksums.ts',
    before: 'Object.entries(tensors).sort(([a], [b]) => a < b ? -1 : 1)',
    after: 'Object.entries(tensors)',
    tests: ['test/gateway/replies.test.ts']
  },
  {
    why: "a client's key of another hop is passed on",
    file: 'src/gateway/headers.ts',
    before: `'proxy-authorization',
`,
    after: '',
    tests: ['test/gateway/replies.test.ts']
  },
  {
    why: 'all engines get all samples of a report',
    file: 'src/gateway/engine-samples.ts',
    before: 'samples: parts.get(worker)!.map(index => claims[index])',
    after: 'samples: claims',
    tests: ['test/gateway/engine-samples.test.ts']
  }
]
