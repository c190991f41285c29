"""Trains a small Qwen3 on bytes of this repository's docs, for benches that need texts with real structure.

usage: byte_models.py FOLDER [SECONDS]

Writes FOLDER/0, FOLDER/1 and FOLDER/2: the model after 80, 90 and 100 % of the time, so that one stands to the next as
the policies of neighbouring steps. 3.6 million parameters in bfloat16, a token is a byte.
"""

import glob
import os
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROWS, LENGTH = 8, 192


def docs() -> torch.Tensor:
    root = os.path.join(os.path.dirname(__file__), "../..")
    text = b"".join(open(name, "rb").read() for name in sorted(glob.glob(f"{root}/docs/**/*.md", recursive=True)))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    folder, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 540.0
    torch.manual_seed(0)
    data = docs()
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    began, step, saves = time.time(), 0, [0.8, 0.9, 1.0]
    while saves:
        done = (time.time() - began) / seconds
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 50) * max(0.1, 1 - done)
        starts = torch.randint(len(data) - LENGTH, (ROWS,))
        rows = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if done >= saves[0]:
            saved = Qwen3ForCausalLM(config)
            saved.load_state_dict(model.state_dict())
            saved.to(torch.bfloat16).save_pretrained(os.path.join(folder, str(3 - len(saves))))
            saves.pop(0)
            print(f"{step} steps, loss {loss.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
