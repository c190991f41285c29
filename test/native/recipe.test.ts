import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import type { ModelRecipe } from '../../src/native/recipe.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

/** Every field of the interface: the compiler refuses a list with a missing or an extra field. */
const FIELDS: Record<keyof ModelRecipe, true> = {
  hiddenSize: true,
  layers: true,
  heads: true,
  kvHeads: true,
  headDim: true,
  vocabSize: true,
  rmsNormEps: true,
  normPlacement: true,
  qkNorm: true,
  activation: true,
  roundOnce: true,
  qkvBias: true,
  oBias: true,
  tieWordEmbeddings: true,
  ropeInvFreq: true,
  ropeScale: true,
  sparseLayers: true,
  experts: true,
  expertsPerToken: true,
  normTopkProb: true
}

t.test('the addon reads exactly the fields of ModelRecipe', async t => {
  t.same(native().recipeFields(), Object.keys(FIELDS))
})

t.test('an architecture has every field of the recipe', async t => {
  t.hasProps(tinyArchitecture('LlamaForCausalLM'), Object.keys(FIELDS))
})
