/** NeMo-RL's receiver sends the key in this header. */
export const KEY_HEADER = 'x-nemo-rl-refit-key'
