"""The adder's tokenizer: one token per byte (so any text has ids and no id is unknown) and four special tokens."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
EOS = 256

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('the adder knows the roles system, user and assistant, not ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content -}}"
    "{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE files, by byte value (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + others.index(byte)) for byte in range(256)]


def build() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save(folder: Path) -> None:
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "additional_special_tokens": SPECIAL[1:],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
