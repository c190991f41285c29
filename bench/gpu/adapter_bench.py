"""LoRA adapters on a GPU, whole server, each figure beside the base model in the same run.

usage: adapter_bench.py [--only WORD]... [--model qwen3-8b] [--layers N] [--tp N] [--folder DIR] [--out FILE]

adapter-throughput, adapter-replace are the parts. Prints markdown rows: figure | refit | compared with | ratio | goal |
reached. Needs torch with CUDA, transformers and safetensors; 16.4 GB for the checkpoint in /dev/shm, the temporary
folder or DIR.
"""

import base64
import concurrent.futures
import gc
import http.client
import io
import json
import pathlib
import statistics
import sys
import time
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # noqa: F401 - it registers how tensors are pickled

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import adapter_files  # noqa: E402
import machine  # noqa: E402
import models  # noqa: E402
from reference import prompts  # noqa: E402
from report import attempt, keep, read_options, row  # noqa: E402
from server import Refused, Server  # noqa: E402
from streams import Stream, spread  # noqa: E402

RANK, RUNNING = 32, 64
PROMPTS, ROUNDS = (128, 1024), 4
# All requests fit into the KV cache; a retraction would be seen as a gap.
GAP_TOKENS = 1000
REPLACEMENTS, EVERY_S = 100, 0.05
# Gaps get longer with the context, so each is compared with the median of its neighbors in runs without replacements.
GAP_RUNS, NEAR = 3, 25


def shapes_of(config):
    """{module: (out, in)} of the linears of a model of models.REAL."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in models.tensors(config)
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in adapter_files.LINEARS
    }


def server_of(options, folder, place, loras, **more):
    flags, env = machine.device_flags(options, options.tp)
    roots = ["--model-root", folder.parent, "--model-root", place]
    return Server(
        folder,
        *flags,
        *roots,
        *["--enable-lora", "--max-loras", loras, "--max-cpu-loras", loras + 8, "--max-lora-rank", RANK],
        *["--max-total-tokens", 98304, "--max-running-requests", RUNNING],
        env=env,
        **more,
    )


def throughput(options, folder, place, config):
    """Decode of 64 running requests with 0, 1, 8 and 32 adapters, the median of interleaved rounds, behind prompts of
    each length."""
    tensors = adapter_files.adapter(shapes_of(config), RANK, 1, device="cuda:0", dtype=torch.bfloat16)
    source = adapter_files.write(place / "adapter", tensors, RANK)
    with server_of(options, folder, place, 32) as server:
        for n in range(32):
            server.post("/load_lora_adapter", dict(lora_name=f"a{n}", lora_path=str(source)))
        for length in PROMPTS:
            batch = prompts(2, (length,) * RUNNING, config["vocab_size"])
            steps = step_times(server, batch)
            base = steps[0]
            for adapters, goal in ((1, 0.92), (8, 0.88), (32, 0.80)):
                ms = steps[adapters]
                row(
                    f"decode, {RUNNING} running behind prompts of {length}, {adapters} "
                    f"adapter{'s' if adapters > 1 else ''} of rank {RANK}",
                    f"{1000 * RUNNING / ms:.0f} tokens/s, {ms:.2f} ms a step",
                    f"{1000 * RUNNING / base:.0f} tokens/s, {base:.2f} ms a step, the base model",
                    base / ms,
                    goal,
                )


def step_times(server, batch):
    """Milliseconds of a decode step by number of adapters."""

    def seconds(adapters, count):
        names = [None] * RUNNING if adapters == 0 else [f"a{n % adapters}" for n in range(RUNNING)]
        sampling = dict(max_new_tokens=count, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        replies = server.post("/generate", dict(input_ids=batch, sampling_params=sampling, lora_path=names), 600)
        if any(len(reply["output_ids"]) != count for reply in replies):
            raise AssertionError("a request ended early")
        return time.perf_counter() - began

    steps = {adapters: [] for adapters in (0, 1, 8, 32)}
    for _ in range(ROUNDS):
        for adapters, found in steps.items():
            # Afterwards the prompts are in the prefix cache.
            seconds(adapters, 4)
            found.append(1000 * (seconds(adapters, 132) - seconds(adapters, 4)) / 128)
    return {adapters: statistics.median(found) for adapters, found in steps.items()}


class Client:
    """One connection that stays open, as a trainer's."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)

    def post(self, path, body):
        """The milliseconds of the call. The body's text is the trainer's work, like its handles."""
        data = json.dumps(body).encode()
        began = time.perf_counter()
        self.connection.request("POST", path, data, {"content-type": "application/json"})
        reply = self.connection.getresponse()
        text = reply.read()
        ms = 1000 * (time.perf_counter() - began)
        if reply.status != 200:
            raise Refused(reply.status, text.decode(errors="replace"))
        return ms


def replace(options, folder, place, config):
    """Replacing an adapter from disk and by handles, idle and under 64 running requests."""
    shapes = shapes_of(config)
    on_card = adapter_files.adapter(shapes, RANK, 1, device="cuda:0", dtype=torch.bfloat16)
    # One allocation for all, as trainers that pack their adapters have it.
    flat = torch.cat([value.flatten() for value in on_card.values()])

    def packed(memory):
        """A handle for each tensor."""
        parts = memory.split([value.numel() for value in on_card.values()])
        named = [(name, part.view(value.shape)) for (name, value), part in zip(on_card.items(), parts)]
        buffer = io.BytesIO()
        ForkingPickler(buffer, 2).dump(named)
        return base64.b64encode(buffer.getvalue()).decode()

    size = 2 * flat.numel()
    source = adapter_files.write(place / "adapter", on_card, RANK)
    with server_of(options, folder, place, 4) as server:
        client = Client(server)

        def disk():
            body = dict(lora_name="policy", lora_path=str(source), load_inplace=True)
            return client.post("/v1/load_lora_adapter", body)

        def handles():
            try:
                server.post("/unload_lora_adapter", dict(lora_name="policy"))
            except Refused:
                pass
            # Memory of its own: torch wraps a memory once more for each handle, and frees what was wrapped some ten
            # thousand times by as deep a recursion, which is a segmentation fault.
            fresh = flat.clone()
            body = dict(
                lora_name="policy",
                config_dict=adapter_files.config(RANK),
                serialized_named_tensors=[packed(fresh)] * options.tp,
            )
            torch.cuda.synchronize()
            ms = client.post("/load_lora_adapter_from_tensors", body)
            del fresh
            torch.cuda.ipc_collect()
            return ms

        def kept():
            body = dict(lora_name="policy", config_dict=adapter_files.config(RANK), upsert=True)
            name = dict(name="bench", generation=1)
            if not kept.sent:
                texts = [packed(flat)] * options.tp
                server.post("/load_lora_adapter_from_tensors", dict(body, serialized_named_tensors=texts, keep=name))
                kept.sent = True
            return client.post("/load_lora_adapter_from_tensors", dict(body, kept=name))

        kept.sent = False

        for what, work, goal in (
            ("page cache", disk, 30),
            ("handles of one allocation", handles, 3),
            ("kept memory", kept, 3),
        ):
            # JavaScript is compiled as it runs.
            taken = [work() for _ in range(60)][-20:]
            middle = statistics.median(taken)
            row(
                f"replace an adapter of rank {RANK} ({size / 1e6:.0f} MB) from {what}, idle, whole call",
                f"{middle:.2f} ms ({min(taken):.2f} to {max(taken):.2f}; {phases(server)})",
                f"{goal} ms",
                goal / middle,
                1,
            )
        batch = prompts(2, (128,) * RUNNING, config["vocab_size"])
        works = {"without": None, "page cache": disk, "kept memory": kept}
        runs = {what: [] for what in works}
        gaps(server, batch)
        # In turn, because a virtual machine is quieter at one time than at another.
        for _ in range(GAP_RUNS):
            for what, work in works.items():
                # The server closes a connection that idles, and a request opens it again.
                client.connection.close()
                runs[what].append(gaps(server, batch, work))
        level = usual_gaps([found for found, _ in runs["without"]])
        ratios = {
            what: [[gap / level[i] for i, gap in enumerate(found)] for found, _ in several]
            for what, several in runs.items()
        }
        for what in ("page cache", "kept memory"):
            row(
                f"longest gap between tokens of {RUNNING} running requests amid {GAP_RUNS * REPLACEMENTS} replacements "
                f"from {what}, one every {1000 * EVERY_S:.0f} ms",
                f"{longest(ratios[what])}; a replacement "
                f"{statistics.median(ms for _, taken in runs[what] for ms in taken):.1f} ms",
                f"{longest(ratios['without'])} without; the usual is the median of the same tokens there, "
                f"{level[0]:.2f} to {level[-1]:.2f} ms",
                max(map(max, ratios[what])),
                1.2,
                True,
            )


def usual_gaps(runs):
    """The median of the gaps around each token."""
    return [
        statistics.median(gap for run in runs for gap in run[max(0, i - NEAR) : i + NEAR]) for i in range(len(runs[0]))
    ]


def longest(runs):
    """For each run the ratios of its gaps."""
    ratios = [ratio for run in runs for ratio in run]
    longer = [sum(ratio > 1.2 for ratio in run) for run in runs]
    return (
        f"{max(ratios):.2f} ({spread(ratios)}; {sum(longer)} of {len(ratios)} above 1.2, "
        f"{'none' if not any(longer) else 'in each run ' + ', '.join(map(str, longer))})"
    )


def gaps(server, batch, work=None):
    """The gaps between tokens of one stream among RUNNING requests that all run longer, and the milliseconds of each
    replacement meanwhile."""

    def crowd():
        sampling = dict(max_new_tokens=GAP_TOKENS + 60, temperature=0, ignore_eos=True)
        names = ([None, "policy"] * (RUNNING // 2))[1:]
        server.post("/generate", dict(input_ids=batch[1:], sampling_params=sampling, lora_path=names), 600)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = pool.submit(crowd)
        found = pool.submit(Stream(server, batch[0], GAP_TOKENS).gaps)
        time.sleep(1)
        taken = []
        for _ in range(REPLACEMENTS if work is not None else 0):
            taken.append(work())
            time.sleep(max(0, EVERY_S - taken[-1] / 1000))
        if found.done():
            raise AssertionError("the stream ended before the last replacement")
        others.result()
        # The crowd's prompts are computed during the first gaps.
        return found.result()[20:], taken


def phases(server):
    """Medians of what the server reports of the last 20 loads."""
    loads = [json.loads(line)["ms"] for line in server.text().splitlines() if "LoRA adapter loaded" in line][-20:]
    return ", ".join(f"{name} {statistics.median(ms[name] for ms in loads):.2f}" for name in loads[0])


PARTS = {"adapter-throughput": throughput, "adapter-replace": replace}


def main():
    options, chosen = read_options(__doc__, PARTS, real=True)
    config = dict(
        models.REAL[options.model], **({} if options.layers is None else dict(num_hidden_layers=options.layers))
    )
    failed = []
    try:
        with machine.room(options, models.size(models.tensors(config)) + (1 << 30)) as place:
            folder = models.real(options.model, place / "model", 1, "cuda:0", options.layers)
            torch.cuda.empty_cache()
            for part in chosen:
                attempt(part, lambda part=part: PARTS[part](options, folder, place, config), failed)
    finally:
        keep()
    # Memory whose handles were sent is freed while CUDA is still there.
    gc.collect()
    torch.cuda.ipc_collect()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
