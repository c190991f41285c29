"""Gaps between the tokens of running requests while weights are updated: into a second set of weights that changes
places with the first between two steps (swap "demand"), in place with a pause around it, and without updates. One
server, by turns.

usage: swap_bench.py [--updates 100] [--every 1.0] [--running 64] [--rate GB/S] [--model qwen3-8b] [--layers N] [--tp N]
[--folder DIR] [--out FILE]

This process is the trainer: its weights lie on the GPU of the engine, and each update writes all of them by a mapping
that is kept. Four of the streams are measured, each by a process of its own. Prints markdown rows: figure | refit |
compared with | ratio | goal | reached. Needs torch with CUDA, transformers and safetensors; on one card three times the
model's weights.
"""

import argparse
import concurrent.futures
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import machine  # noqa: E402
import models  # noqa: E402
import tensor_payloads as payloads  # noqa: E402
from reference import prompts  # noqa: E402
from report import OUT, attempt, keep, row, tell  # noqa: E402
from server import Server  # noqa: E402
from streams import Stream, at, spread  # noqa: E402
from tensor_client import Client  # noqa: E402

PROMPT, TOKENS, MEASURED = 128, 1024, 4
# The first tokens come while other prompts are still computed.
SKIPPED = 40
MODES = {"none": "without updates", "demand": "a second set of weights", "in_place": "in place"}


class Run:
    def __init__(self, options, server, config):
        self.options, self.server, self.config = options, server, config
        self.client = Client(server.port)
        self.batch = prompts(2, (PROMPT,) * options.running, config["vocab_size"])
        self.named = payloads.pooled(1, models.tensors(config), "cuda:0")
        self.gaps = {mode: [] for mode in MODES}
        self.calls = {mode: [] for mode in MODES}
        self.stalls = {mode: [] for mode in MODES}
        self.phases = []
        self.sent = set()

    def update(self, mode):
        """One update of all weights, whole call; other values each time."""
        for _, tensor in self.named[:3]:
            tensor.view(torch.int16).bitwise_xor_(len(self.calls[mode]) + 1)
        torch.cuda.synchronize()
        name = dict(name=f"bench-{mode}", generation=1)
        if mode not in self.sent:
            texts = [payloads.serialize(self.named, by_uuid=False)]
            self.client.post(dict(serialized_named_tensors=texts, keep=name, swap=mode, flush_cache=False))
            self.sent.add(mode)
        began = time.perf_counter()
        # In place, an update waits for running requests unless generation is paused.
        if mode == "in_place":
            self.server.post("/pause_generation", dict(mode="in_place"))
        _, reply = self.client.post(dict(kept=name, swap=mode, flush_cache=False))
        if mode == "in_place":
            self.server.post("/continue_generation", {})
        ms = 1000 * (time.perf_counter() - began)
        self.calls[mode].append(ms)
        if mode == "demand":
            self.phases.append(reply["report"]["ms"])
        self.stalls[mode].append(self.server.get("/updates?limit=1")["updates"][0]["stall_ms"] or 0)

    def round(self, mode, most):
        """All streams once. With updates: one begins every so many seconds, at most `most`."""
        with concurrent.futures.ThreadPoolExecutor(MEASURED + 1) as pool:
            sampling = dict(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
            body = dict(input_ids=self.batch[MEASURED:], sampling_params=sampling)
            others = pool.submit(self.server.post, "/generate", body, 600)
            measured = [pool.submit(Stream(self.server, prompt, TOKENS).gaps) for prompt in self.batch[:MEASURED]]
            began, count = time.monotonic(), 0
            time.sleep(1)
            while mode != "none" and count < most and not any(one.done() for one in measured):
                self.update(mode)
                count += 1
                time.sleep(max(0, began + 1 + count * self.options.every - time.monotonic()))
            others.result()
            for one in measured:
                self.gaps[mode] += one.result()[SKIPPED:-5]

    def all(self):
        for mode in MODES:
            self.round(mode, 3)  # JavaScript is compiled, graphs are made
        for mode in MODES:
            self.gaps[mode], self.calls[mode], self.stalls[mode] = [], [], []
        self.phases = []
        while len(self.calls["demand"]) < self.options.updates:
            for mode in MODES:
                self.round(mode, self.options.updates - len(self.calls[mode]))

    def verify(self):
        self.update("demand")
        wanted, got = payloads.checksums_of(self.named), self.server.checksums()
        wrong = [name for name in wanted if got.get(name) != wanted[name]]
        if wrong:
            raise AssertionError(f"{len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}")

    def report(self):
        size, running = models.size(models.tensors(self.config)), self.options.running
        quiet, swapped = sorted(self.gaps["none"]), sorted(self.gaps["demand"])
        step = at(quiet, 0.5)
        for mode, title in MODES.items():
            calls = self.calls[mode]
            took = f"; {len(calls)} updates, a call {statistics.median(calls):.1f} ms" if calls else ""
            stall = f", gate shut {statistics.median(self.stalls[mode]):.1f} ms" if calls else ""
            gaps = self.gaps[mode]
            tell(f"{title}: {len(gaps)} gaps, {spread(gaps)}, longest {max(gaps):.2f} ms{took}{stall}")
        ms = {key: statistics.median(phases[key] for phases in self.phases) for key in self.phases[0]}
        what = f"{running} running requests, {size / 1e9:.1f} GB every {self.options.every:g} s"
        row(
            f"{what}: median gap between tokens amid updates into the second set",
            f"{at(swapped, 0.5):.2f} ms",
            f"{step:.2f} ms without",
            at(swapped, 0.5) / step,
            1.1,
            True,
        )
        row(
            f"{what}: p99.9",
            f"{at(swapped, 0.999):.2f} ms ({', '.join(f'{key} {value:.2f}' for key, value in ms.items())})",
            f"{at(quiet, 0.999) + step:.2f} ms, p99.9 without and one step",
            at(swapped, 0.999) / (at(quiet, 0.999) + step),
            1,
            True,
        )
        longest = max(self.gaps["in_place"])
        row(f"{what}: longest", f"{swapped[-1]:.2f} ms", f"{longest:.2f} ms in place", longest / swapped[-1])
        tokens = {mode: 1000 * len(gaps) / sum(gaps) for mode, gaps in self.gaps.items()}
        rates = ", ".join(f"{title} {running * tokens[mode]:.0f}" for mode, title in MODES.items())
        tell(f"tokens per second of all streams: {rates}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--model", choices=[*models.REAL], default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--folder")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.device = "cuda"
    OUT.extend([options.out] if options.out else [])
    layers = {} if options.layers is None else dict(num_hidden_layers=options.layers)
    config = dict(models.REAL[options.model], **layers)
    failed = []
    try:
        with machine.room(options) as place:
            # Sparse files: every update brings all values.
            folder = models.hollow(place / "model", config)
            flags, env = machine.device_flags(options, options.tp)
            flags += ["--shadow-weights", "--shadow-rate", options.rate]
            tokens = options.running * (PROMPT + TOKENS + 16)
            flags += ["--max-total-tokens", tokens, "--max-running-requests", options.running]
            with Server(folder, *flags, env=env) as server:
                run = Run(options, server, config)

                def work():
                    run.all()
                    run.verify()
                    run.report()

                attempt("swap", work, failed, server)
    finally:
        keep()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
