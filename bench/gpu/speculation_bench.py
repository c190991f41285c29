"""Generation with guesses (--speculative siblings) against the same server without, in one run.

usage: speculation_bench.py [--only WORD]... [--text DIR] [--train SECONDS] [--folder DIR] [--out FILE]

exact: Qwen3-8B with random weights, one request of 128 tokens in and 256 out, and then the same again. A step has at
most 16 tokens, whose products do not depend on how many there are, so the outputs must be equal. Prefixes are not
cached: a prompt would be computed in other steps the second time.
text: a model of 250 million parameters that is trained here on bytes of the Python files below DIR
(bench/python/byte_models.py), and then embedded into the layers of Qwen3-8B: the other rows and columns are zeros, so
it writes the same texts and takes the time of 8 billion parameters. Its first policy and its third answer prompts from
text that it has not seen, 8 samples of each, 512 bytes long; figures are those of the third, which has seen outputs of
the first.

Both servers are on one GPU and take turns. Each pair of runs has equal requests.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import time

import numpy
import safetensors.torch
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import machine  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
from server import Server  # noqa: E402

SAMPLES, PROMPT, OUTPUT = 8, 192, 512


class Pair:
    """Two servers of one model: with guesses, and without."""

    def __init__(self, folder, *flags):
        common = ["--device", "cuda", "--skip-tokenizer-init", "--mem-fraction", "0.42"]
        self.guessing = Server(folder, *common, "--speculative", "siblings", *flags)
        self.plain = Server(folder, *common)
        self.guessing.guesses, self.plain.guesses = True, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.each():
            server.stop()

    def each(self):
        return (self.guessing, self.plain)


def run(server, requests, count, temperature=1.0):
    """Sends requests (prompt, seed) as one batch; returns its seconds, tokens, steps, counts of guesses, outputs."""

    def counts():
        text = server.get("/metrics")
        names = ["engine_steps"]
        if server.guesses:
            names += ["spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
        found = [re.search(rf"^refit:{name}_total\S* (\S+)$", text, re.MULTILINE) for name in names]
        return numpy.array([float(match[1]) for match in found] + [0] * (3 - len(found)))

    body = {
        "input_ids": [prompt for prompt, _ in requests],
        "sampling_params": [
            {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True, "sampling_seed": seed}
            for _, seed in requests
        ],
    }
    before, began = counts(), time.perf_counter()
    replies = server.post("/generate", body)
    seconds = time.perf_counter() - began
    steps, drafted, accepted = (int(n) for n in counts() - before)
    outputs = [reply["output_ids"] for reply in replies]
    assert all(len(ids) == count for ids in outputs), [len(ids) for ids in outputs]
    return dict(s=seconds, tokens=count * len(requests), steps=steps, drafted=drafted, accepted=accepted, out=outputs)


def tell(name, ours, other):
    """A row of two runs, or of two lists of runs."""
    ours, other = ([runs] if isinstance(runs, dict) else runs for runs in (ours, other))

    def total(runs, key):
        return sum(one[key] for one in runs)

    def cell(runs):
        rate, step = total(runs, "tokens") / total(runs, "s"), 1000 * total(runs, "s") / total(runs, "steps")
        return f"{rate:,.0f} tok/s in {total(runs, 'steps')} steps of {step:.2f} ms"

    right = f"{total(ours, 'accepted')} of {total(ours, 'drafted')} guesses right"
    report.row(name, f"{cell(ours)}, {right}", cell(other), total(other, "s") / total(ours, "s"))


def exact(options, scratch):
    folder = scratch / "8b"
    models.real("qwen3-8b", folder, 7, "cuda")
    torch.cuda.empty_cache()
    prompt, other = numpy.random.default_rng(3).integers(1000, 150_000, (2, 128)).tolist()
    with Pair(folder, "--speculative-num-draft-tokens", "15", "--disable-adaptive-speculation") as pair:
        for server in pair.each():
            run(server, [(other, 1)], 64)
        for name in ("a new output", "the same again", "and again"):
            for server in pair.each():
                server.post("/flush_cache")
            runs = [run(server, [(prompt, 5)], 256) for server in pair.each()]
            tell(f"8B, 1 at once, {name}", *runs)
            if runs[0]["out"] != runs[1]["out"]:
                raise AssertionError(f"{name}: other tokens with guesses")


def embed(small, folder):
    """Writes the small model as a part of one with the layers of Qwen3-8B."""
    config = json.loads((small / "config.json").read_text())
    real = models.REAL["qwen3-8b"]
    hidden = real["hidden_size"]
    scale = (config["hidden_size"] / hidden) ** 0.5  # a norm over more elements, most of them zeros, gives larger ones
    weights = safetensors.torch.load_file(small / "model.safetensors")
    sizes = {
        "q_proj": (real["num_attention_heads"] * real["head_dim"], hidden),
        "k_proj": (real["num_key_value_heads"] * real["head_dim"], hidden),
        "v_proj": (real["num_key_value_heads"] * real["head_dim"], hidden),
        "o_proj": (hidden, real["num_attention_heads"] * real["head_dim"]),
        "gate_proj": (real["intermediate_size"], hidden),
        "up_proj": (real["intermediate_size"], hidden),
        "down_proj": (hidden, real["intermediate_size"]),
    }
    out = {}
    for layer in range(real["num_hidden_layers"]):
        for name, like in ((n, w) for n, w in weights.items() if ".layers.0." in n):
            own = weights.get(name.replace(".layers.0.", f".layers.{layer}."))
            kind = name.split(".")[-2]
            if kind in ("q_norm", "k_norm"):
                padded = like.clone() if own is None else own
            else:
                padded = torch.zeros(sizes.get(kind, (hidden,)), dtype=torch.bfloat16)
                if own is not None:
                    padded[tuple(slice(n) for n in own.shape)] = own * scale if "norm" in kind else own
            out[name.replace(".layers.0.", f".layers.{layer}.")] = padded.contiguous()
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        own = weights[name]
        padded = torch.zeros((*own.shape[:-1], hidden), dtype=torch.bfloat16)
        padded[..., : own.shape[-1]] = own * scale if "norm" in name else own
        out[name] = padded
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config.update({key: real[key] for key in keys})
    config.pop("layer_types", None)
    config["max_window_layers"] = real["num_hidden_layers"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(out, folder / "model.safetensors")


def text(options, scratch):
    small = scratch / "bytes"
    train = [str(ROOT / "bench/python/byte_models.py"), str(small), str(options.train), "--size", "large"]
    subprocess.run([sys.executable, *train, "--text", str(options.text)], check=True)
    policies = [scratch / f"policy-{at}" for at in (0, 2)]
    for at, folder in zip((0, 2), policies, strict=True):
        embed(small / str(at), folder)
    unseen = (small / "held-out").read_bytes()
    starts = numpy.random.default_rng(4).choice(len(unseen) - PROMPT, 32, replace=False)
    prompts = [list(unseen[start : start + PROMPT]) for start in starts]
    with Pair(policies[0]) as pair:
        for groups, count in ((1, 2), (4, 4), (8, 8), (16, 16)):
            for temperature in (1.0, 0.6):
                for policy, folder in enumerate(policies):
                    for server in pair.each():
                        server.post("/update_weights_from_disk", {"model_path": str(folder)})
                    runs = ([], [])
                    for first in range(0, count, groups):
                        requests = [
                            (prompts[at], 1000 * policy + SAMPLES * at + sample)
                            for at in range(first, first + groups)
                            for sample in range(SAMPLES)
                        ]
                        for server, kept in zip(pair.each(), runs, strict=True):
                            kept.append(run(server, requests, OUTPUT, temperature))
                tell(f"text, {SAMPLES * groups} at once, temperature {temperature:g}", *runs)
                if groups == 1:
                    sample = bytes(min(token, 255) for token in runs[1][0]["out"][0])
                    print(f"a sample: {sample!r}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(sysconfig.get_path("purelib")), metavar="DIR")
    parser.add_argument("--train", type=float, default=90, metavar="SECONDS")
    parser.add_argument("--folder")
    parser.add_argument("--out")
    options = parser.parse_args()
    report.OUT.extend([options.out] if options.out else [])
    failed = []
    report.tell(f"{torch.cuda.get_device_name(0)}\n")
    report.tell("| figure | with guesses | without | ratio | goal | reached |")
    report.tell("| --- | --- | --- | --- | --- | --- |")
    with machine.room(options, 33 << 30) as scratch:
        for name, part in (("exact", exact), ("text", text)):
            if not options.only or any(word in name for word in options.only):
                report.attempt(name, lambda part=part: part(options, scratch), failed)
    sys.exit(len(failed))


main()
