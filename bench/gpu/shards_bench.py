"""A sharded trainer beside an engine: updates from its shards (docs/shards.md), beside the same trainer's updates of
gathered tensors and of whole copies on each GPU.

usage: shards_bench.py [--only WORD] [--model qwen3-8b] [--layers N] [--folder DIR] [--out FILE]

shards: two ranks of torch with FSDP2's placements and an engine of two ranks take two GPUs, which they share.
shards-nccl: half of the GPUs (at most four) have a rank of the trainer each, and the others (at most two) the engine.
The shards travel by NCCL from rank to rank; beside them the same messages by torch alone, and gathered tensors in
broadcasts.
A whole update is measured in rank 0, from the first call to the end of the transaction. After each kind all checksums
are compared with the trainer's. Prints markdown rows: figure | refit | compared with | ratio | goal | reached.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test/gpu"), str(ROOT / "clients/python")]
import machine  # noqa: E402
import models  # noqa: E402
from distributed_setup import NCCL, nccl_of_torch  # noqa: E402
from report import attempt, keep, read_options, row  # noqa: E402
from server import Server, free_port  # noqa: E402
from tensor_weights import checksums_of, coded  # noqa: E402

RANKS, WARM, ROUNDS = 2, 5, 15
CHUNK = 256 << 20
GOAL = 0.85


class Rank:
    """A rank of the trainer, which holds the rows of torch.chunk of each tensor, as FSDP2 does."""

    def __init__(self, url, shapes):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        import refit

        self.rank, self.shapes, self.client = int(os.environ["RANK"]), shapes, refit.Client(url)
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        self.world = int(os.environ["WORLD_SIZE"])
        self.dist, self.mesh, self.variant = dist, init_device_mesh("cuda", (self.world,)), 0
        self.groups = dict(
            shards=self.client.shard_group(process_group=dist.group.WORLD, backend="nccl", timeout_s=120),
            gathered=self.client.group(backend="nccl", timeout_s=120),
        )
        self.shards = {name: self.shard(name, shape) for name, shape in shapes}
        self.whole = {name: coded(0, name, shape, self.device) for name, shape in shapes}

    def local(self, name, shape):
        parts = coded(self.variant, name, shape, self.device).chunk(self.world)
        return parts[self.rank].clone()

    def shard(self, name, shape):
        from torch.distributed.tensor import DTensor, Shard

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            self.local(name, shape), self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def step(self):
        """Other values in the same memory."""
        self.variant += 1
        for name, shape in self.shapes:
            value = coded(self.variant, name, shape, self.device)
            self.whole[name].copy_(value)
            self.shards[name].to_local().copy_(value.chunk(self.world)[self.rank])
        torch.cuda.synchronize()
        self.dist.barrier()

    def update(self, kind, transport):
        """Milliseconds of one update, and those that the server wrote."""
        began = time.perf_counter()
        fields = dict(process_group=self.dist.group.WORLD, transport=transport, in_place=kind == "whole")
        if transport == "group":
            fields.update(group=self.groups[kind], bucket_bytes=CHUNK)
        with self.client.update(version=f"{kind}-{self.variant}", **fields) as update:
            if kind == "shards":
                update.add_sharded(self.shards)
            else:
                update.add_all(self.shards if kind == "gathered" else self.whole)
        taken = 1000 * (time.perf_counter() - began)
        entries = self.client.json("GET", "/updates", admin=True)["updates"] if self.rank == 0 else [{}]
        return taken, entries[0].get("ms", {})

    def measure(self, kind, transport):
        taken, phases = [], []
        for turn in range(WARM + ROUNDS):
            # New values now and then: they take longer to make than to send.
            if turn in (0, WARM, WARM + ROUNDS - 1):
                self.step()
            self.dist.barrier()
            ms, inside = self.update(kind, transport)
            if turn >= WARM:
                taken.append(ms)
                phases.append(inside)
        if transport == "kept":
            if self.rank == 0:
                self.client.release_kept()
            self.client.engines[0].kept.clear()
        if transport == "group":
            self.groups[kind].leave()
        self.dist.barrier()
        wrong = []
        if self.rank == 0:
            got = self.client.checksums()
            wanted = checksums_of(self.whole.items())
            wrong = [name for name in wanted if got.get(name) != wanted[name]]
            if len(got) != len(wanted):
                wrong.append(f"{len(got)} tensors instead of {len(wanted)}")
        middle = {name: round(statistics.median(one.get(name, 0) for one in phases), 2) for name in phases[0]}
        return dict(
            ms=statistics.median(taken), least=min(taken), most=max(taken), phases=middle, wrong=wrong,
            messages=self.messages() if kind == "shards" and transport == "group" else [],
        )  # fmt: skip

    def messages(self):
        """By rank of the trainer and chunk: the messages of the plan, as [rank of the engine, bytes]."""
        plans = self.client.engines[0].plans
        (columns,) = [sends[1]["messages"] for key, sends in plans.items() if isinstance(key, tuple)]
        chunks = {}
        for chunk, rank, size in zip(columns["chunk"], columns["rank"], columns["bytes"]):
            chunks.setdefault(chunk, []).append([rank, size])
        every = [None] * self.world
        self.dist.all_gather_object(every, [chunks[chunk] for chunk in sorted(chunks)])
        return every


def rank_main():
    url, shapes = json.loads(sys.argv[2]), [(name, tuple(shape)) for name, shape in json.loads(sys.argv[3])]
    rank = Rank(url, shapes)
    for kind, transport in json.loads(sys.argv[4]):
        found = rank.measure(kind, transport)
        if rank.rank == 0:
            print(json.dumps(dict(found, kind=kind, transport=transport)), flush=True)
    rank.dist.barrier()
    rank.dist.destroy_process_group()


def raw_main():
    """The messages of a plan by torch's batch_isend_irecv alone: the trainer's ranks send, the others receive."""
    import torch.distributed as dist

    rank, plan = int(os.environ["RANK"]), json.loads(pathlib.Path(sys.argv[2]).read_text())
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    senders, device = len(plan), torch.device("cuda", rank)

    def batches(merged):
        """[[(peer, bytes)]] of this rank, by chunk."""
        found = []
        for chunk in range(max(map(len, plan))):
            mine = []
            for sender, chunks in enumerate(plan):
                for to, size in chunks[chunk] if chunk < len(chunks) else []:
                    if rank in (sender, senders + to):
                        mine.append((senders + to if rank == sender else sender, size))
            if merged:
                peers = dict.fromkeys(peer for peer, _ in mine)
                mine = [(peer, sum(size for other, size in mine if other == peer)) for peer in peers]
            found.append(mine)
        return found

    total = sum(size for batch in batches(False) for _, size in batch)
    memory, do = torch.zeros(total, dtype=torch.uint8, device=device), dist.isend if rank < senders else dist.irecv
    for merged in (False, True):
        at, ops = 0, []
        for batch in batches(merged):
            ops.append([])
            for peer, size in batch:
                ops[-1].append(dist.P2POp(do, memory[at : at + size], peer))
                at += size
        taken = []
        for _ in range(WARM + ROUNDS):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            works = [work for batch in ops if batch for work in dist.batch_isend_irecv(batch)]
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            taken.append(1000 * (time.perf_counter() - began))
        taken = taken[WARM:]
        if rank == 0:
            ms = statistics.median(taken)
            print(json.dumps(dict(kind="raw", transport="merged" if merged else "messages", ms=ms)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(arguments, world):
    """{(kind, transport): result} of the processes of a trainer."""
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world))
    env.update(NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="4")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=dict(env, RANK=str(rank))
        )
        for rank in range(world)
    ]
    texts = [process.communicate(timeout=480)[0] for process in processes]
    if any(process.returncode != 0 for process in processes):
        raise RuntimeError(f"the trainer's ranks ended with {[process.returncode for process in processes]}")
    results = [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]
    return {(result["kind"], result["transport"]): result for result in results}


def told(result, size):
    rate = f"{result['ms']:.1f} ms, {size / result['ms'] / 1e6:.0f} GB/s"
    return f"{rate} ({result['least']:.1f} to {result['most']:.1f}; inside {result['phases']})"


def shards(options, config):
    if torch.cuda.device_count() < RANKS:
        raise RuntimeError(f"needs {RANKS} GPUs, there are {torch.cuda.device_count()}")
    shapes = models.tensors(config)
    size = models.size(shapes)
    kinds = [("shards", "kept"), ("whole", "kept"), ("shards", "handles"), ("gathered", "handles")]
    with machine.room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        flags = ["--device", "cuda", "--tp", RANKS, "--max-total-tokens", 4096, "--skip-tokenizer-init"]
        with Server(folder, *flags, env=dict(NCCL_NVLS_ENABLE="0")) as server:
            arguments = ["--rank", json.dumps(server.url), json.dumps(shapes), json.dumps(kinds)]
            found = run_ranks(arguments, RANKS)
    for kind, result in found.items():
        if result["wrong"]:
            raise AssertionError(f"{kind}: wrong tensors: {result['wrong'][:5]}")
    title = f"{options.model}, {size / 1e9:.1f} GB, {RANKS} FSDP2 ranks into {RANKS} ranks on the same GPUs"
    kept, whole = found["shards", "kept"], found["whole", "kept"]
    row(
        f"{title}: shards, kept mapping",
        told(kept, size),
        f"{told(whole, size)}: each rank reads a whole copy on its GPU, kept mapping",
        whole["ms"] / kept["ms"],
        GOAL,
    )
    sent, gathered = found["shards", "handles"], found["gathered", "handles"]
    row(
        f"{title}: shards, handles",
        told(sent, size),
        f"{told(gathered, size)}: gathered by NCCL, buckets by handles",
        gathered["ms"] / sent["ms"],
        1,
    )


def nccl(options, config):
    count = torch.cuda.device_count()
    if count < 2:
        raise RuntimeError(f"needs 2 GPUs, there are {count}")
    world, tp = min(4, count // 2), min(2, count // 2)
    shapes = models.tensors(config)
    size = models.size(shapes)
    kinds = [("shards", "group"), ("gathered", "group")]
    env = dict(NCCL, **(dict(REFIT_NCCL=nccl_of_torch()) if nccl_of_torch() else {}))
    with machine.room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        flags = ["--device", f"cuda:{world}", "--tp", tp, "--max-total-tokens", 4096, "--skip-tokenizer-init"]
        with Server(folder, *flags, env=env) as server:
            arguments = ["--rank", json.dumps(server.url), json.dumps(shapes), json.dumps(kinds)]
            found = run_ranks(arguments, world)
    sent, gathered = found["shards", "group"], found["gathered", "group"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sent["messages"], file)
        file.flush()
        raw = run_ranks(["--raw", file.name], world + tp)
    for kind, result in found.items():
        if result["wrong"]:
            raise AssertionError(f"{kind}: wrong tensors: {result['wrong'][:5]}")
    title = f"{options.model}, {size / 1e9:.1f} GB, {world} FSDP2 ranks into {tp} ranks on other GPUs: shards by NCCL"
    alone, merged = raw["raw", "messages"]["ms"], raw["raw", "merged"]["ms"]
    beside = f"{alone:.1f} ms, {size / alone / 1e6:.0f} GB/s: the same messages by torch alone"
    received = sent["phases"]["scatter"]
    row(f"{title}, whole update", told(sent, size), beside, alone / sent["ms"], GOAL)
    row(f"{title}, received", f"{received:.1f} ms, {size / received / 1e6:.0f} GB/s", beside, alone / received, GOAL)
    row(
        f"{title}, received",
        f"{received:.1f} ms, {size / received / 1e6:.0f} GB/s",
        f"{merged:.1f} ms, {size / merged / 1e6:.0f} GB/s: torch alone, one message for each pair and chunk",
        merged / received,
    )
    row(f"{title}, whole update", told(sent, size), f"{told(gathered, size)}: gathered, then broadcast",
        gathered["ms"] / sent["ms"], 1)  # fmt: skip


def main():
    options, chosen = read_options(__doc__, ["shards", "shards-nccl"], real=True)
    config = dict(
        models.REAL[options.model], **({} if options.layers is None else dict(num_hidden_layers=options.layers))
    )
    failed = []
    try:
        for part, run in {"shards": shards, "shards-nccl": nccl}.items():
            if part in chosen:
                attempt(part, lambda run=run: run(options, config), failed)
    finally:
        keep()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    {"--rank": rank_main, "--raw": raw_main}.get("".join(sys.argv[1:2]), main)()
