// These limits are far above any model. They prevent that a config with absurd numbers fills the memory with tables.
export const MAX_WIDTH = 2 ** 24
export const MAX_LAYERS = 1024
export const MAX_EXPERTS = 4096
