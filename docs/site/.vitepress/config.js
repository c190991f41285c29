import { defineConfig } from 'vitepress'
import { slug } from '../../../scripts/site/slug.ts'
import { TOPICS } from '../../../scripts/site/topics.ts'

export default defineConfig({
  title: 'refit',
  description: 'A rollout server for RL training whose weights can be replaced while it runs',
  srcDir: 'pages',
  outDir: '../../build/site',
  cacheDir: '../../build/site-cache',
  cleanUrls: false,
  markdown: { anchor: { slugify: slug } },
  themeConfig: {
    outline: [2, 3],
    search: { provider: 'local' },
    nav: [
      { text: 'Quick start', link: '/quick-start' },
      { text: 'Trainers', link: '/trainers/' },
      { text: 'API', link: '/api/openapi.html', target: '_self' },
      { text: 'Gateway API', link: '/api/gateway.html', target: '_self' }
    ],
    sidebar: TOPICS.map(topic => ({ ...topic, collapsed: false }))
  }
})
