// Far above any model. They keep a config with absurd numbers from making tables that fill the memory.
export const MAX_WIDTH = 2 ** 24
export const MAX_LAYERS = 1024
export const MAX_EXPERTS = 4096
