import fc from 'fast-check'
import t from 'tap'
import { buildModelTable } from '../../src/model/model-table.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const table = buildModelTable(tinyArchitecture('LlamaForCausalLM'), 1)
const tied = buildModelTable(tinyArchitecture('Qwen2ForCausalLM'), 1)
const q = 'model.layers.0.self_attn.q_proj.weight'

const spellings: Array<[string, string]> = [
  [q, q],
  ['layers.0.self_attn.q_proj.weight', q],
  ['embed_tokens.weight', 'model.embed_tokens.weight'],
  ['norm.weight', 'model.norm.weight'],
  ['model.language_model.layers.0.self_attn.q_proj.weight', q],
  ['language_model.model.layers.0.self_attn.q_proj.weight', q],
  ['language_model.lm_head.weight', 'lm_head.weight'],
  ['module.' + q, q],
  ['module.module.' + q, q],
  ['module.lm_head.weight', 'lm_head.weight'],
  ['_fsdp_wrapped_module.' + q, q],
  ['_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight', q],
  ['model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight', q],
  ['_orig_mod.' + q, q],
  ['module._orig_mod.' + q, q],
  ['base_model.model.' + q, q],
  ['base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight', q],
  ['base_model.model.lm_head.weight', 'lm_head.weight']
]
for (const [sent, expected] of spellings) {
  t.test(`${sent} means ${expected}`, async t => {
    t.equal(table.canonical(sent), expected)
  })
}

t.test('names that the model does not have are returned as they were sent', async t => {
  for (
    const name of [
      '',
      'module.',
      'module.nothing',
      'model.layers.2.self_attn.q_proj.weight',
      'visual.patch_embed.weight',
      'model.' + q,
      'layers',
      '__proto__',
      'module.constructor'
    ]
  ) {
    t.equal(table.canonical(name), name)
  }
})

t.test('every name of a model maps to itself, under any nesting of wrapper prefixes', async t => {
  const names = fc.constantFrom(...table.tensors.keys())
  const prefix = fc.array(
    fc.constantFrom(
      'module.',
      '_orig_mod.',
      '_fsdp_wrapped_module.',
      'base_model.model.',
      'model.language_model.',
      'language_model.'
    ),
    { maxLength: 3 }
  )
  fc.assert(fc.property(names, prefix, (name, prefixes) => table.canonical(prefixes.join('') + name) === name))
})

t.test('a tied head and rotary buffers are ignored, under any spelling; an untied head is not', async t => {
  for (const name of ['lm_head.weight', 'module.lm_head.weight', 'language_model.lm_head.weight']) {
    t.ok(tied.ignored(tied.canonical(name)), name)
    t.notOk(table.ignored(table.canonical(name)), name)
    t.ok(table.tensors.has(table.canonical(name)))
  }
  for (
    const name of [
      'model.layers.0.self_attn.rotary_emb.inv_freq',
      'model.rotary_emb.inv_freq',
      'rotary_emb.inv_freq',
      'module.model.layers.1.self_attn.rotary_emb.cos_cached'
    ]
  ) {
    t.ok(table.ignored(name), name)
  }
  for (
    const name of [
      'inv_freq',
      'model.norm.weight',
      'rotary_emb.inv_freq.weight',
      'xrotary_emb.inv_freq',
      'lm_head.bias'
    ]
  ) t.notOk(table.ignored(name), name)
})
