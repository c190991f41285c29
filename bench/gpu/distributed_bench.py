"""/update_weights_from_distributed between GPUs: whole requests, POST to 200, beside plain NCCL broadcasts and torch's
own receive loop.

usage: distributed_bench.py [--only WORD]... [--device cuda|cpu] [--model qwen3-8b] [--layers N] [--folder DIR] [--out
FILE]

distributed-empty, distributed-init, distributed-bucket, distributed-buckets, distributed-each and distributed-tp2 are
the parts. This process is the trainer, on GPU 0; engines are on GPU 1 (and 2). Beside each engine's rank is a process
of torch on the same GPU (torch_group_receiver.py), in a group of its own: the plain broadcast of the same bytes in the
same chunks, and torch's receive loop. refit and the comparison take turns, communicators are warm, and after every part
all checksums are compared with the trainer's. On a CPU gloo is used. Prints markdown rows: figure | refit | compared
with | ratio | goal | reached.
"""

import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
sys.path.insert(0, str(ROOT / "examples/trainers"))
import machine  # noqa: E402
import models  # noqa: E402
import tensor_payloads as payloads  # noqa: E402
from distributed_group import UPDATE  # noqa: E402
from distributed_setup import NCCL, nccl_of_torch  # noqa: E402
from distributed_side import Client, Side  # noqa: E402
from report import attempt, keep, read_options, row, tell  # noqa: E402
from server import Server  # noqa: E402
from tiny_models import TINY  # noqa: E402

ROUNDS = 7
BUCKET = 512_000_000


def announced(named, name, bucket):
    body = dict(
        names=[entry for entry, _ in named],
        dtypes=["bfloat16"] * len(named),
        shapes=[list(tensor.shape) for _, tensor in named],
        group_name=name,
        flush_cache=False,
    )
    return {**body, "load_format": "flattened_bucket"} if bucket else body


def flat(named):
    return torch.cat([tensor.view(-1) for _, tensor in named]).view(torch.uint8)


class Run:
    """A server with its trainer's weights, and processes of torch beside it."""

    def __init__(self, options, server, config, ranks):
        self.options, self.server = options, server
        self.shapes = models.tensors(config)
        self.bytes = models.size(self.shapes)
        self.named = payloads.pooled(1, self.shapes, options.torch_device)
        self.ours = Side(f"ours-{ranks}", [Client(server.port)], ranks, options)
        self.receivers = [self.receiver(rank) for rank in range(ranks)]
        self.torch = Side(f"theirs-{ranks}", [client for client, _ in self.receivers], ranks, options)
        self.ours.join()
        self.torch.join()
        self.where = f"tp {ranks}, {1 + ranks} cards" if ranks > 1 else "two cards"

    def receiver(self, rank):
        env = dict(NCCL)
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench/gpu/torch_group_receiver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        process.stdin.write(
            json.dumps(
                dict(
                    device=f"cuda:{1 + rank}" if self.options.device == "cuda" else "cpu",
                    backend=self.options.backend,
                    shapes=self.shapes,
                )
            )
            + "\n"
        )
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"bench/gpu/torch_group_receiver.py ended with {process.wait()}")
        return Client(int(line)), process

    def close(self):
        for _, process in self.receivers:
            process.kill()
            process.wait()

    def prepare(self, variant):
        """Noise in the engine, another variant's values in the trainer."""
        for name, tensor in self.named:
            payloads.coded(variant, name, tensor.shape, out=tensor)
        self.server.post("/weights_checker", dict(action="reset_tensors"))
        for reply in self.torch.ask("/forget", {}):
            reply.result()
        self.options.synchronize()

    def verify(self):
        wanted, got = payloads.checksums_of(self.named), self.server.checksums()
        wrong = [name for name in wanted if got.get(name) != wanted[name]]
        if wrong or got.keys() != wanted.keys():
            raise AssertionError(f"{len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}")

    def gbs(self, ms):
        return f"{ms:.2f} ms, {self.bytes / ms / 1e6:.0f} GB/s"

    def told(self, taken, replies):
        phases, in_place = {}, sum(reply.get("report", {}).get("bytes_in_place", 0) for reply in replies)
        for reply in replies:
            for name, ms in reply.get("report", {}).get("ms", {}).items():
                phases[name] = round(phases.get(name, 0) + ms, 2)
        return (
            f"{self.gbs(statistics.median(taken))} ({min(taken):.1f} to {max(taken):.1f}; inside, the last time, "
            f"{phases}, {in_place / 1e9:.1f} GB straight into the weights)"
        )

    def turns(self, **works):
        """Runs each in turn, without counting the first round: {name: [milliseconds]}."""
        taken = {name: [] for name in works}
        for turn in range(ROUNDS + 1):
            for name, work in works.items():
                ms = work()
                if turn > 0:
                    taken[name].append(ms)
        return taken


def one_request(run, bucket, title, goal):
    run.prepare(3 if bucket else 4)
    tensors = [flat(run.named)] if bucket else [tensor.view(-1).view(torch.uint8) for _, tensor in run.named]
    body, last = announced(run.named, run.ours.name, bucket), []

    def ours():
        ms, last[:] = run.ours.request(UPDATE, body, tensors)
        return ms

    taken = run.turns(ours=ours, plain=lambda: run.torch.plain(tensors))
    run.verify()
    mine, plain = statistics.median(taken["ours"]), statistics.median(taken["plain"])
    row(
        f"{title}, {run.bytes / 1e9:.1f} GB, {run.where}",
        run.told(taken["ours"], last),
        f"{run.gbs(plain)}, plain broadcasts of the same bytes in the same chunks, torch to torch",
        plain / mine,
        goal,
    )


def bucket(run):
    one_request(run, True, "one flattened bucket, one request", 0.88)


def each(run):
    one_request(run, False, f"{len(run.named)} separate broadcasts, one request", 0.80)


def two_ranks(run):
    one_request(run, True, "one flattened bucket, one request", 0.85)
    one_request(run, False, f"{len(run.named)} separate broadcasts, one request", None)


def buckets(run):
    run.prepare(5)
    packed = [(entries, flat(entries)) for entries in payloads.by_bytes(run.named, BUCKET)]
    last = []

    def requests(side):
        total, replies = 0.0, []
        for entries, tensor in packed:
            ms, said = side.request(UPDATE, announced(entries, side.name, True), [tensor])
            total += ms
            replies += said
        last[:] = replies if side is run.ours else last
        return total

    taken = run.turns(
        ours=lambda: requests(run.ours),
        theirs=lambda: requests(run.torch),
        plain=lambda: run.torch.plain([tensor for _, tensor in packed]),
    )
    run.verify()
    mine, theirs, plain = (statistics.median(taken[name]) for name in ("ours", "theirs", "plain"))
    row(
        f"flattened buckets of {BUCKET / 1e6:.0f} MB, {len(packed)} requests, {run.where}",
        run.told(taken["ours"], last),
        f"{run.gbs(plain)}, plain broadcasts of the same chunks, one after another",
        plain / mine,
        0.60,
    )
    row(
        "the same",
        f"{mine:.2f} ms",
        f"{theirs:.1f} ms, torch's receive loop behind the same HTTP ({min(taken['theirs']):.1f} to "
        f"{max(taken['theirs']):.1f})",
        theirs / mine,
        2,
    )


def empty(run):
    body = dict(names=[], dtypes=[], shapes=[], group_name=run.ours.name, flush_cache=False)
    client = run.ours.clients[0]
    taken = sorted(client.post(UPDATE, body)[0] for _ in range(500))[:400]
    ms = statistics.median(taken)
    row(
        "an update without tensors, median of 400",
        f"{ms:.3f} ms (90 of 100 under {taken[360]:.3f})",
        "1 ms",
        ms,
        1,
        most=True,
    )


def init(run):
    taken = []
    for number in range(9):
        side = Side(f"init-{number}", run.ours.clients, run.ours.ranks, run.options)
        taken.append(side.join(pause_s=0.3))
        side.leave()
    ms = statistics.median(taken)
    row(
        "to join a group whose trainer is there, POST to 200",
        f"{ms:.1f} ms ({min(taken):.1f} to {max(taken):.1f})",
        "50 ms",
        ms / 50,
        1,
        most=True,
    )


ONE = {
    "distributed-empty": empty,
    "distributed-init": init,
    "distributed-bucket": bucket,
    "distributed-buckets": buckets,
    "distributed-each": each,
}
TWO = {"distributed-tp2": two_ranks}


def run_parts(options, parts, ranks, failed):
    if options.device == "cuda" and machine.cards() < 1 + ranks:
        for part in parts:
            tell(f"| {part} | NOT RUN | {1 + ranks} cards are needed, and there are {machine.cards()} | | | |")
        keep()
        return
    config = (
        TINY
        if options.model == "tiny"
        else dict(
            models.REAL[options.model], **({} if options.layers is None else dict(num_hidden_layers=options.layers))
        )
    )
    with machine.room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        flags = (
            ["--device", "cuda:1"]
            if options.device == "cuda"
            else ["--device", "cpu", "--dtype", "bfloat16", "--threads", 2]
        )
        env = dict(NCCL, **(dict(REFIT_NCCL=nccl_of_torch()) if nccl_of_torch() else {}))
        with Server(
            folder,
            *flags,
            "--tp",
            ranks,
            "--skip-tokenizer-init",
            "--max-total-tokens",
            4096,
            "--bucket-bytes",
            1 << 35,
            env=env,
        ) as server:
            run = Run(options, server, config, ranks)
            try:
                for part in parts:
                    attempt(part, lambda: {**ONE, **TWO}[part](run), failed, server)
                    gc.collect()
                run.ours.leave()
                run.torch.leave()
            finally:
                run.close()


def main():
    options, chosen = read_options(__doc__, [*ONE, *TWO])
    options.backend = "nccl" if options.device == "cuda" else "gloo"
    options.synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    failed = []
    try:
        for parts, ranks in [(ONE, 1), (TWO, 2)]:
            mine = [part for part in chosen if part in parts]
            if mine:
                attempt(f"tp {ranks}", lambda: run_parts(options, mine, ranks, failed), failed)
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    finally:
        keep()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in NCCL.items()})
    main()
