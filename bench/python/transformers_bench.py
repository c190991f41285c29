"""The same model through transformers on torch's CPU kernels: prefill, batched decode, and an update in place.

usage: transformers_bench.py MODEL_DIR THREADS [prefill|decode|turns ...]
Prints one JSON line per measurement: {"what", "ms": [each round]}. `turns` updates the model once from each folder that
comes on a line of the standard input, and answers each with a line.
"""

import glob
import json
import sys
import time

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

folder, threads, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
vocabulary = model.config.vocab_size
generator = torch.Generator().manual_seed(1)


def report(what, rounds):
    print(json.dumps({"what": what, "ms": [round(1e3 * seconds, 3) for seconds in rounds]}), flush=True)


@torch.inference_mode()
def prefill(tokens=512, rounds=5):
    ids = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    report("prefill", times[1:])


@torch.inference_mode()
def decode(batch=16, prompt=32, steps=16):
    ids = torch.randint(0, vocabulary, (batch, prompt), generator=generator)
    out = model(ids, use_cache=True, logits_to_keep=1)
    token, cache, times = out.logits[:, -1:].argmax(-1), out.past_key_values, []
    for _ in range(steps):
        start = time.perf_counter()
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        times.append(time.perf_counter() - start)
    report("decode", times[2:])


@torch.inference_mode()
def turns():
    parameters = dict(model.named_parameters())
    report("ready", [])
    for line in sys.stdin:
        start = time.perf_counter()
        for file in sorted(glob.glob(line.rstrip("\n") + "/*.safetensors")):
            for name, tensor in load_file(file).items():
                if name in parameters:
                    parameters[name].copy_(tensor)
        report("update", [time.perf_counter() - start])


for name in wanted:
    {"prefill": prefill, "decode": decode, "turns": turns}[name]()
