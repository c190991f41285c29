"""Trains a Qwen3 on bytes of text, for benches that need texts with real structure.

usage: byte_models.py FOLDER [SECONDS] [--size small|large] [--text DIR]

Writes FOLDER/0, FOLDER/1 and FOLDER/2: the model after 80, 90 and 100 % of the time, so that one stands to the next as
the policies of neighbouring steps; and FOLDER/held-out, a hundredth of the text, that it has not seen. A token is a
byte. small: 3.6 million parameters, for a CPU. large: 250 million, for a GPU. The text is this repository's docs, or
the Python and Markdown files below DIR. Weights are in bfloat16.
"""

import argparse
import pathlib
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# A model's hidden and intermediate size, layers, heads, KV heads, head_dim; rows, bytes and learning rate of a step.
SIZES = {"small": ((256, 768, 4, 4, 2, 64), (8, 192, 2e-3)), "large": ((1024, 3072, 20, 8, 2, 128), (64, 512, 6e-4))}


def read(folder: pathlib.Path) -> torch.Tensor:
    names = sorted(name for name in folder.rglob("*") if name.suffix in (".md", ".py") and name.is_file())
    text = b"".join(name.read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def model_of(size: str) -> Qwen3ForCausalLM:
    hidden, inter, layers, heads, kv_heads, head_dim = SIZES[size][0]
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("seconds", type=float, nargs="?", default=540.0)
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--text", type=pathlib.Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and options.size == "large" else "cpu"
    rows, length, rate = SIZES[options.size][1]
    data = read(options.text)
    kept = len(data) - len(data) // 100
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "held-out").write_bytes(bytes(data[kept:].tolist()))
    data = data[:kept].to(device)
    model = model_of(options.size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    began, step, saves = time.time(), 0, [0.8, 0.9, 1.0]
    while saves:
        done = (time.time() - began) / options.seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / 50) * max(0.1, 1 - done)
        starts = torch.randint(kept - length, (rows,), device=device)
        batch = data[starts[:, None] + torch.arange(length, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if done >= saves[0]:
            saved = model_of(options.size)
            saved.load_state_dict(model.state_dict())
            saved.to(torch.bfloat16).save_pretrained(options.folder / str(3 - len(saves)))
            saves.pop(0)
            print(f"{step} steps, loss {loss.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
