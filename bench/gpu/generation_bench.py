"""Generation on a GPU through HTTP: refit, and vLLM and SGLang where they are installed, one after the other.

usage: generation_bench.py [--model qwen3-8b|qwen3-30b-a3b] [--layers N] [--only CASE]... [--folder DIR] [--out FILE]
                           [--peer vllm=SITE] [--peer sglang=SITE] [--variant NAME=OPTIONS]...
                           [--checkpoint DIR] [--server NAME]...

Plain HTTP, token ids in and out, not streamed, temperature 1, ignore_eos; the length of every answer is checked. Each
case runs twice, and the second run counts. decode-N: N requests at once, 128 tokens in, 256 out. long-N: 1,024 in, 256
out. prefill: 64 requests of 4,096 in, 1 out, in input tokens a second. rl: 64 groups of 8 requests with one prompt of
512 tokens, outputs of exponential lengths with a mean of 512 and at most 2,048, from one seed, all at once. Prompts are
distinct but for groups. SITE: a folder of Python packages with the peer. A variant is refit with more options. Prints a
markdown table. Weights are random with the scale of Hugging Face's initialisation; --checkpoint keeps them in DIR, or
takes those that are there. --server: only these (refit, a peer, a variant). Needs torch with CUDA, safetensors and
aiohttp.
"""

import argparse
import asyncio
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib

import aiohttp
import numpy
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import machine  # noqa: E402
import models  # noqa: E402
from server import PROGRAM, free_port, node  # noqa: E402

DECODE = (1, 16, 64, 128, 256, 512)
START_SECONDS = 400


def prompts(count, length, random):
    return random.integers(1000, 150_000, (count, length)).tolist()


def cases():
    """{name: (requests of one run, unit, figure of its tokens and seconds)}; a request is (prompt, output tokens)."""

    def plain(count, length, output):
        return lambda random: [(prompt, output) for prompt in prompts(count, length, random)]

    def groups(random):
        lengths = numpy.maximum(1, numpy.minimum(random.exponential(512, 512), 2048)).astype(int).tolist()
        return [(prompt, lengths[8 * i + j]) for i, prompt in enumerate(prompts(64, 512, random)) for j in range(8)]

    def output_rate(_, output, seconds):
        return output / seconds

    found = {f"decode-{count}": (plain(count, 128, 256), "tok/s", output_rate) for count in DECODE}
    found.update({f"long-{count}": (plain(count, 1024, 256), "tok/s", output_rate) for count in (64, 256)})
    found["prefill"] = (plain(64, 4096, 1), "tok/s", lambda prompt, _, seconds: prompt / seconds)
    found["rl"] = (groups, "s", lambda _prompt, _output, seconds: seconds)
    return found


async def generate(session, name, prompt, output):
    """Sends one request and returns the number of tokens that it got."""
    sampling = {"temperature": 1.0, "ignore_eos": True}
    if name == "vllm":
        body = {"token_ids": prompt, "sampling_params": {**sampling, "max_tokens": output, "detokenize": False}}
        async with session.post("/inference/v1/generate", json=body) as reply:
            reply.raise_for_status()
            return len((await reply.json())["choices"][0]["token_ids"])
    body = {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": output}}
    async with session.post("/generate", json=body) as reply:
        reply.raise_for_status()
        return len((await reply.json())["output_ids"])


async def measure(name, port, requests):
    """Sends all requests at once; returns seconds."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=limits, timeout=timeout) as session:
        began = time.perf_counter()
        counts = await asyncio.gather(*(generate(session, name, *request) for request in requests))
        seconds = time.perf_counter() - began
    wrong = [(got, asked) for got, (_, asked) in zip(counts, requests, strict=True) if got != asked]
    if wrong:
        raise RuntimeError(f"{len(wrong)} answers of {len(requests)} have another length: {wrong[0]} (got, asked)")
    return seconds


def commands(folder, port, sites, variants):
    """{server: (command line, environment)}; refit first."""
    plain = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    most = str(max(DECODE))
    python = [sys.executable, "-m"]
    every = {
        "refit": [
            *(node(), str(PROGRAM), "serve", str(folder), "--device", "cuda", "--skip-tokenizer-init"),
            *("--port", str(port)),
        ],
        "vllm": [
            *(*python, "vllm.entrypoints.openai.api_server", "--model", str(folder), "--tokens-only"),
            *("--max-num-seqs", most, "--port", str(port)),
        ],
        "sglang": [
            *(*python, "sglang.launch_server", "--model-path", str(folder), "--skip-tokenizer-init"),
            *("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.85"),
            *("--cuda-graph-max-bs-decode", most, "--max-running-requests", most, "--port", str(port)),
        ],
    }
    chosen = {"refit": (every["refit"], plain)}
    for name, options in variants.items():
        chosen[name] = ([*every["refit"], *options.split()], plain)
    for name, site in sites.items():
        chosen[name] = (every[name], dict(plain, PYTHONPATH=site))
    return chosen


def wait_ready(process, port, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{pathlib.Path(log).read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready within {START_SECONDS} s:\n{pathlib.Path(log).read_text()[-3000:]}")


def run(name, command, environment, port, wanted):
    """{case: figure} of one server."""
    figures = {}
    with tempfile.NamedTemporaryFile(suffix=f".{name}.log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_ready(process, port, log.name)
            for case, (requests_of, unit, figure) in wanted.items():
                # Each case has prompts of its own: a prefix of another's would be in the cache.
                random = numpy.random.default_rng([11, zlib.crc32(case.encode())])
                for _ in range(2):  # other prompts and lengths of rl; the last counts
                    requests = requests_of(random)
                    seconds = asyncio.run(measure(name, port, requests))
                prompt, output = (sum(sizes) for sizes in zip(*((len(ids), out) for ids, out in requests), strict=True))
                figures[case] = figure(prompt, output, seconds)
                print(f"{name} {case}: {figures[case]:,.1f} {unit}", file=sys.stderr, flush=True)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    return figures


def table(model, results, wanted):
    compared = len(results) > 1 and "refit" in results
    head = ["case", *results, *(["refit / best of the others"] if compared else [])]
    lines = [f"{model} on {torch.cuda.get_device_name(0)}", "", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for case, (_, unit, _) in wanted.items():
        values = [results[name][case] for name in results]
        cells = [f"{value:,.1f} {unit}" for value in values]
        if compared:
            cells.append(f"{min(values[1:]) / values[0] if unit == 's' else values[0] / max(values[1:]):.2f}")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*models.REAL], default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--folder")
    parser.add_argument("--out")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=SITE")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--server", action="append", default=[], metavar="NAME")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS")
    return parser.parse_args()


def main():
    options = read_options()
    sites, variants = (dict(entry.split("=", 1) for entry in given) for given in (options.peer, options.variant))
    wanted = {
        name: case for name, case in cases().items() if not options.only or any(word in name for word in options.only)
    }
    config = dict(models.REAL[options.model])
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    needed = 0 if options.checkpoint else models.size(models.tensors(config))
    with machine.room(options, needed) as scratch:
        folder = options.checkpoint or scratch / "model"
        if not (folder / "config.json").exists():
            models.real(options.model, folder, 7, "cuda", options.layers)
            torch.cuda.empty_cache()
        port, results = free_port(), {}
        for name, (command, environment) in commands(folder, port, sites, variants).items():
            if options.server and name not in options.server:
                continue
            results[name] = run(name, command, environment, port, wanted)
        text = table(options.model, results, wanted)
    print(text)
    if options.out:
        pathlib.Path(options.out).write_text(text)


main()
