import type { OptionTable } from '../option.ts'

/** Options of the model: the checkpoint, its names and where its weights come from. */
export const MODEL_OPTIONS = {
  model: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'MODEL',
    aliases: ['model-path'],
    help: 'A folder with config.json and safetensors files, or a name (org/name) in the local Hugging Face cache. ' +
      'Also the first argument without a flag.',
    unset: 'required'
  },
  revision: {
    type: 'string',
    default: 'main',
    group: 'model',
    value: 'NAME',
    help: 'Branch, tag or commit of a model that is taken from the Hugging Face cache.'
  },
  servedModelName: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'NAME',
    help: 'Name of the model in replies and in /v1/models.',
    unset: 'MODEL as it was given'
  },
  tokenizerPath: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'PATH',
    help: 'Folder that holds tokenizer.json and tokenizer_config.json.',
    unset: "the model's folder"
  },
  grammarBackend: {
    type: 'choice',
    choices: ['refit', 'none'],
    spellings: { xgrammar: 'refit', outlines: 'refit', llguidance: 'refit', auto: 'refit', guidance: 'refit' },
    default: 'refit',
    group: 'model',
    help: 'What follows the grammars of requests (structured output); none refuses them. Needs a tokenizer.'
  },
  skipTokenizerInit: {
    type: 'boolean',
    default: false,
    group: 'model',
    help: 'Serve token ids only: no tokenizer is loaded, text prompts are refused.'
  },
  toolCallParser: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'NAME',
    help: 'Format in which the model writes calls of tools, as SGLang or vLLM names it: qwen25, hermes, qwen3_coder, ' +
      'glm45, deepseekv3, kimi_k2, gpt-oss, llama3, mistral and more (docs/tools.md). Chat replies then contain ' +
      'tool_calls.',
    unset: 'tools need "tool_choice": "none"'
  },
  reasoningParser: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'NAME',
    help: 'Format in which the model writes its reasoning, as SGLang or vLLM names it: qwen3, deepseek-r1, glm45, ' +
      'kimi_k2, gpt-oss and more (docs/tools.md). Chat replies then contain it apart from their content.',
    unset: 'reasoning is a part of the content'
  },
  enableInReasoning: {
    type: 'boolean',
    default: false,
    group: 'model',
    help: 'Grammars of chat requests constrain the reasoning, too, as of their first token. Without it they begin ' +
      'behind the reasoning that --reasoning-parser separates.'
  },
  weightVersion: {
    type: 'string',
    default: 'default',
    group: 'model',
    value: 'LABEL',
    help: 'Label of the weights that are loaded at start.'
  },
  loadFrom: {
    type: 'string',
    default: null,
    group: 'model',
    value: 'URL',
    help: 'Loads weights and label from a refit server that serves this model, instead of from the folder of MODEL, ' +
      'which then needs only its configuration and tokenizer.',
    unset: 'from the folder of MODEL'
  },
  loadFromKey: {
    type: 'string',
    default: null,
    group: 'model',
    secret: true,
    value: 'KEY',
    help: 'Admin key of that server (its API key if it has no admin key). Other users of the machine can see flags: ' +
      'prefer the variable.',
    unset: 'no key is sent'
  },
  loadFromTimeout: {
    type: 'number',
    default: 300,
    min: 1,
    max: 86400,
    group: 'model',
    value: 'SECONDS',
    help: 'Longest wait until that server is ready to send, and for each step of the transfer.'
  },
  modelRoot: {
    type: 'list',
    default: [],
    group: 'model',
    value: 'FOLDER',
    help: 'Folder from which weights may be loaded by request; may be given several times.',
    unset: 'the folder that holds the served model'
  }
} as const satisfies OptionTable
