"""Trains the two bundled models, models/adder-base and models/adder: one tiny Qwen3 that adds numbers of one to three
digits.

    python examples/adder/train.py [--steps N] [--out models]

Needs torch and transformers; one CPU core is enough. The same seed, versions and processor give the same files.
"""

import argparse
import copy
import shutil
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import adder_tokenizer
import sums

ROOT = Path(__file__).resolve().parents[2]
IGNORE = -100
CHAT = "<|user|>{}+{}=<|assistant|>"


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=adder_tokenizer.EOS,
        pad_token_id=adder_tokenizer.EOS,
    )
    # On one core and on sequences this short, plain attention is faster than the fused one.
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config)


def make_batch(tokenizer, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [batch, longest], padded on the right; labels are set where an answer is to be learnt."""
    rows = []
    for pieces in samples:
        ids, labels = [], []
        for text, learnt in pieces:
            piece = tokenizer.encode(text).ids
            ids += piece
            labels += piece if learnt else [IGNORE] * len(piece)
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), adder_tokenizer.EOS)
    labels = torch.full((len(rows), longest), IGNORE)
    for row, (row_ids, row_labels) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def answer_loss(model, ids, labels) -> torch.Tensor:
    wanted = labels[:, 1:]
    learnt = wanted != IGNORE
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[learnt])
    return cross_entropy(logits.float(), wanted[learnt])


@torch.inference_mode()
def accuracy(model, tokenizer, pairs, form="{}+{}=") -> float:
    """Share of sums answered right and ended, greedily in bfloat16. All prompts must have one length: nothing is
    padded."""
    judged = copy.deepcopy(model).to(torch.bfloat16).eval()
    prompts = torch.tensor([tokenizer.encode(form.format(a, b)).ids for a, b in pairs])
    out = judged.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=6)
    right = 0
    for row, (a, b) in zip(out[:, prompts.shape[1] :].tolist(), pairs):
        text = tokenizer.decode(row, skip_special_tokens=False)
        right += text.split("<|endoftext|>")[0] == str(a + b) and "<|endoftext|>" in text
    return right / len(pairs)


def save(model, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=adder_tokenizer.EOS, pad_token_id=adder_tokenizer.EOS
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    adder_tokenizer.save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plain", type=int, default=256, help="plain sums per step")
    parser.add_argument("--chat", type=int, default=64, help="chat sums per step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop early (for a trial)")
    parser.add_argument("--out", type=Path, default=ROOT / "models")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = adder_tokenizer.build()
    sampler = sums.Sampler(args.seed)
    measured, choosing = sums.held_out()
    sums.PROMPTS.write_text("".join(sums.plain(a, b) + "\n" for a, b in measured))

    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    kept = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=0.05, cycle_momentum=False
    )

    started = time.time()
    base = None
    for step in range(1, args.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        plain_loss = answer_loss(model, *make_batch(tokenizer, [sampler.plain() for _ in range(args.plain)]))
        (plain_loss * 0.6).backward()
        chat_loss = answer_loss(model, *make_batch(tokenizer, [sampler.chat() for _ in range(args.chat)]))
        (chat_loss * 0.4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % (25 if base is None else 250) == 0:
            score = {"plain": accuracy(model, tokenizer, choosing), "chat": accuracy(model, tokenizer, choosing, CHAT)}
            elapsed = time.time() - started
            print(f"step {step}  loss {plain_loss:.4f} {chat_loss:.4f}  {score}  {elapsed:.0f} s", flush=True)
            if base is None and score["plain"] <= 0.68 and score["chat"] >= 0.3:
                base = step
                save(model, args.out / "adder-base")
                print(f"base: step {step}", flush=True)
            if elapsed > args.minutes * 60:
                break
    save(model, args.out / "adder")

    for name in ["adder-base", "adder"]:
        if (args.out / name).exists():
            loaded = Qwen3ForCausalLM.from_pretrained(args.out / name, dtype=torch.bfloat16)
            score = {
                "plain": accuracy(loaded, tokenizer, measured),
                "chat": accuracy(loaded, tokenizer, measured, CHAT),
            }
            print(f"{name}: {score} on prompts.txt", flush=True)
    print(f"base from step {base}, {time.time() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
