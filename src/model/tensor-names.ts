// Wrappers of torch that insert a part in the middle of names: FSDP, activation checkpointing, torch.compile, PEFT.
const WRAPPERS = /_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|(?<=\.)base_layer\./g
// DataParallel and Megatron, PEFT, and the language half of a vision-language model.
const PREFIX = /^(?:module\.|base_model\.model\.|(?:model\.)?language_model\.)/
const BARE = /^(?:layers|embed_tokens|norm)\./
const BUFFER = /(?:^|\.)rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)$/

/**
 * The checkpoint name for a name that a trainer sent; the name unchanged if there is none. `known`: the names of the
 * model.
 */
export function canonicalName (name: string, known: (name: string) => boolean): string {
  if (known(name)) return name
  let bare = name.replace(WRAPPERS, '')
  for (let match = PREFIX.exec(bare); match !== null; match = PREFIX.exec(bare)) bare = bare.slice(match[0].length)
  if (BARE.test(bare)) bare = 'model.' + bare
  return known(bare) ? bare : name
}

/** True for buffers that checkpoints of older libraries contain and that follow from config.json. */
export function isBuffer (name: string): boolean {
  return BUFFER.test(name)
}
