"""Whole-server figures on a GPU, each beside what it is compared with in the same run.

usage: server_bench.py [--only WORD]... [--model qwen3-8b] [--layers N] [--tp N] [--folder DIR] [--out FILE]

load, memory, decode-1, decode-64 are the parts. Prints markdown rows: figure | refit | compared with | ratio | goal |
reached. Needs torch with CUDA, transformers and safetensors; 16.4 GB for the checkpoint in /dev/shm, the temporary
folder or DIR.
"""

import concurrent.futures
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import machine  # noqa: E402
import models  # noqa: E402
from reference import prompts  # noqa: E402
from report import attempt, keep, read_options, row  # noqa: E402
from server import Server  # noqa: E402


def timed(work, rounds=3):
    """Median seconds."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def ceilings():
    return json.loads(
        subprocess.run([ROOT / "build/probe/bandwidth", "--json"], capture_output=True, text=True, check=True).stdout
    )


def pread_gbs(files, threads=16, piece=32 << 20):
    """Bytes of files in the page cache, read by threads into pinned buffers of their own: GB/s."""
    buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(threads)]
    opened = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in files]
    pieces = [(file, offset) for file, size in opened for offset in range(0, size, piece)]

    def read(thread):
        for file, offset in pieces[thread::threads]:
            os.preadv(file, [memoryview(buffers[thread])], offset)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        seconds = timed(lambda: list(pool.map(read, range(threads))))
    for file, _ in opened:
        os.close(file)
    return sum(size for _, size in opened) / seconds / 1e9


def load_file_seconds(files):
    """The work of a Python server: it loads every shard of the checkpoint onto the GPU, tensor by tensor."""
    from safetensors.torch import load_file

    def load():
        held = [load_file(path, device="cuda:0") for path in files]
        torch.cuda.synchronize()
        held.clear()

    seconds = timed(load)
    gc.collect()
    torch.cuda.empty_cache()
    return seconds


def logged(server, message):
    """Fields of the log lines with this message, oldest first."""
    found = []
    for line in server.text().splitlines():
        if line.startswith("{") and message in line:
            entry = json.loads(line)
            if entry.get("msg", "").startswith(message):
                found.append(entry)
    return found


def load(options, folder, size, card):
    files = sorted(folder.glob("*.safetensors"))
    theirs = load_file_seconds(files)
    pread = pread_gbs(files)
    limit = min(pread, card["h2d_gbs"] * options.tp)
    flags, env = machine.device_flags(options, options.tp)
    with Server(folder, *flags, "--max-total-tokens", 4096, "--model-root", folder.parent, env=env) as server:
        reports = [
            server.post("/update_weights_from_disk", dict(model_path=str(folder), weight_version=str(i)), timeout=600)[
                "report"
            ]
            for i in range(5)
        ]
        whole = [report["ms"]["total"] for report in reports]
        ms, write = statistics.median(whole), statistics.median(report["ms"]["write"] for report in reports)
        phases = {
            name: round(statistics.median(report["ms"][name] for report in reports), 1) for name in reports[0]["ms"]
        }
        ready = server.start_s
    row(
        f"update_weights_from_disk, {size / 1e9:.1f} GB (page cache), whole call",
        f"{ms:.0f} ms, {size / ms / 1e6:.1f} GB/s ({phases})",
        f"{limit:.1f} GB/s, the lesser of pinned host to card ({card['h2d_gbs']:.1f}) and 16-thread pread into pinned "
        f"memory ({pread:.1f})",
        size / ms / 1e6 / limit,
        0.9,
    )
    row(
        "the same, the write alone",
        f"{write:.0f} ms, {size / write / 1e6:.1f} GB/s",
        f"{limit:.1f} GB/s, as above",
        size / write / 1e6 / limit,
        None,
    )
    row(
        "the same",
        f"{ms:.0f} ms",
        f'{1000 * theirs:.0f} ms, safetensors.torch.load_file(device="cuda"), {size / theirs / 1e9:.1f} GB/s',
        1000 * theirs / ms,
        5,
    )
    row(
        "from the start of the process until it is ready",
        f"{ready:.1f} s",
        f"{theirs:.1f} s, load_file alone",
        theirs / ready,
        None,
    )


def memory(options, folder, size, _):
    flags, env = machine.device_flags(options, options.tp)
    torch.cuda.empty_cache()
    release, resume, back = [], [], []
    with Server(folder, *flags, "--max-total-tokens", 4096, env=env) as server:
        # The first turn allocates what is allocated once.
        for turn in range(6):
            awake = machine.free_on_card()
            began = time.perf_counter()
            server.post("/release_memory_occupation", dict(tags=["weights"]))
            middle = time.perf_counter()
            back.append(machine.free_on_card() - awake)
            between = time.perf_counter()
            server.post("/resume_memory_occupation", dict(tags=["weights"]))
            ended = time.perf_counter()
            if turn > 0:
                release.append(1000 * (middle - began))
                resume.append(1000 * (ended - between))
        inside = [[entry["ms"] for entry in logged(server, f"memory {what}")[1:]] for what in ("released", "resumed")]
    for what, taken, own in zip(("release", "resume"), (release, resume), inside):
        middle = statistics.median(taken)
        row(
            f"{what} of {size / 1e9:.1f} GB of weights, whole call",
            f"{middle:.1f} ms ({statistics.median(own) if own else 0:.0f} inside; {min(taken):.1f} to "
            f"{max(taken):.1f})",
            "100 ms",
            100 / middle,
            1,
        )
    row(
        "bytes that came back to the card",
        f"{min(back) / 1e9:.3f} GB",
        f"{size / 1e9:.3f} GB of weights",
        min(back) / size,
        0.99,
    )


def step_ms(server, batch, fewer, more):
    """Milliseconds per decode step, without HTTP and prefill, which are in both calls."""

    def run(count):
        replies = server.generate(batch, count)
        if any(len(ids) != count for ids, _ in replies):
            raise AssertionError("a request ended early")

    run(fewer)
    run(more)
    return 1000 * (timed(lambda: run(more), 5) - timed(lambda: run(fewer), 5)) / (more - fewer)


def sizes(config, context, batch):
    """Bytes that one step must read: weights without unused rows of the embedding, experts in the expected number for a
    random batch, and KV cache per sequence."""
    shapes = models.tensors(config)
    unread = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    if "num_experts" in config:
        missed = (1 - config["num_experts_per_tok"] / config["num_experts"]) ** batch
        unread += missed * models.size([entry for entry in shapes if ".experts." in entry[0]])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv = context * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2
    return models.size(shapes) - unread, kv


def decode_1(options, folder, _, card):
    config = json.loads((folder / "config.json").read_text())
    batch = prompts(1, (64,), config["vocab_size"])
    weights, kv = sizes(config, 64 + 160, 1)
    for ranks in sorted({1, options.tp, min(2, machine.cards())}):
        flags, env = machine.device_flags(options, ranks)
        with Server(folder, *flags, "--max-total-tokens", 4096, env=env) as server:
            ms = step_ms(server, batch, 32, 288)
            step = 1000 * server.metric("refit:engine_step_seconds")
        gbs = (weights + kv) / ms / 1e6
        row(
            f"decode, batch 1, tp {ranks}",
            f"{1000 / ms:.1f} tokens/s, {ms:.2f} ms a token (the engine's last step {step:.2f}), {gbs:.0f} GB/s of "
            f"weights and cache",
            f"{ranks * card['read_gbs']:.0f} GB/s read by a kernel",
            gbs / ranks / card["read_gbs"],
            0.5 if ranks == 1 else None,
        )


def transformers_step_ms(folder, batch, fewer, more):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda:0").eval()
    ids = torch.tensor(batch, device="cuda:0")

    def run(count):
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        if out.shape[1] != ids.shape[1] + count:
            raise AssertionError("transformers ended early")

    run(2)
    ms = 1000 * (timed(lambda: run(more), 2) - timed(lambda: run(fewer), 2)) / (more - fewer)
    model = None
    gc.collect()
    torch.cuda.empty_cache()
    return ms


def decode_64(options, folder, _, card):
    config = json.loads((folder / "config.json").read_text())
    context, batch_size = 1024, 64
    batch = prompts(2, (context,) * batch_size, config["vocab_size"])
    flags, env = machine.device_flags(options, options.tp)
    # Prompts come from the prefix cache in every call but the first.
    room = batch_size * (context + 512)
    with Server(folder, *flags, "--max-total-tokens", room, "--max-running-requests", batch_size, env=env) as server:
        ours = step_ms(server, batch, 2, 130)
        step = 1000 * server.metric("refit:engine_step_seconds")
    theirs = transformers_step_ms(folder, batch, 2, 66)
    weights, kv = sizes(config, context + 66, batch_size)
    row(
        f"decode, batch {batch_size}, context {context}, tp {options.tp}",
        f"{1000 * batch_size / ours:.0f} tokens/s, {ours:.2f} ms a step (the engine's last {step:.2f})",
        f"{1000 * batch_size / theirs:.0f} tokens/s, {theirs:.2f} ms a step, transformers' generate",
        theirs / ours,
        3,
    )
    gbs = (weights + batch_size * kv) / ours / 1e6
    row(
        "the same, in bytes that a step has to read",
        f"{gbs:.0f} GB/s",
        f"{options.tp * card['read_gbs']:.0f} GB/s read by a kernel",
        gbs / options.tp / card["read_gbs"],
        None,
    )


PARTS = {"load": load, "memory": memory, "decode-1": decode_1, "decode-64": decode_64}


def main():
    options, chosen = read_options(__doc__, PARTS, real=True)
    config = dict(
        models.REAL[options.model], **({} if options.layers is None else dict(num_hidden_layers=options.layers))
    )
    size = models.size(models.tensors(config))
    failed = []
    try:
        with machine.room(options, size) as place:
            folder = models.real(options.model, place / "model", 1, "cuda:0", options.layers)
            torch.cuda.empty_cache()
            card = ceilings()
            print(json.dumps(card), flush=True)
            for part in chosen:
                attempt(part, lambda part=part: PARTS[part](options, folder, size, card), failed)
    finally:
        keep()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
