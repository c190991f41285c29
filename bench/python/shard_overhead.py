"""The cost of an update from shards beside its bytes: the client's Python, HTTP, and the server's own work.

usage: shard_overhead.py [--before FOLDER] [--only WORD] [--ranks N] [--rounds N] [--profile]

The models have the names and the number of tensors of real ones and a few kilobytes a tensor, so that the bytes cost
next to nothing. The trainer's ranks (FSDP2's placements, gloo) and the engine use the CPU. --before: another checkout
of refit, built, whose server and client take turns with those of this one. --profile: prints where rank 0's Python
spends its time, and measures nothing else.
Prints markdown rows: figure | refit | compared with | ratio. "ms" is the median of whole updates as rank 0 sees them,
"outside" what is left of it without the server's phases, "CPU" the processor time of rank 0. A machine that does other
work disturbs the last one least.
"""

import argparse
import cProfile
import json
import os
import pathlib
import pstats
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parents[2]
ROOT = pathlib.Path(os.environ.get("REFIT_BENCH_ROOT", HERE))
sys.path[:0] = [str(HERE / "test/gpu"), str(ROOT / "clients/python")]
import models  # noqa: E402
from server import Server, free_port  # noqa: E402

SMALL = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32,
             moe_intermediate_size=16, vocab_size=256)  # fmt: skip
TRANSPORTS = ["kept", "handles", "group", "upload"]
WARM = 3


def config_of(model):
    real = models.REAL[model]
    return dict(real, **{name: value for name, value in SMALL.items() if name in real})


class Rank:
    """A rank of the trainer. Other processes drive it by lines of JSON."""

    def __init__(self, url, shapes):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        import refit

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.dist, self.rank, self.world = dist, dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.world,))
        self.client = refit.Client(url)
        self.group = self.client.shard_group(process_group=dist.group.WORLD, backend="gloo", timeout_s=120)
        self.state, self.turn, self.calls = {}, 0, []
        for name, shape in shapes:
            whole = torch.randn(shape).to(torch.bfloat16)
            parts = whole.chunk(self.world)
            local = parts[self.rank].clone() if self.rank < len(parts) else whole[:0].clone()
            self.state[name] = DTensor.from_local(
                local, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        self.watch_calls()

    def watch_calls(self):
        """Notes how long each request takes."""
        call = self.client.call

        def timed(method, path, *args, **options):
            began = time.perf_counter()
            try:
                return call(method, path, *args, **options)
            finally:
                short = re.sub(r"(plans|transactions)/[^/]+", r"\1/ID", path.split("?")[0])
                self.calls.append((f"{method} {short}", 1000 * (time.perf_counter() - began)))

        self.client.call = timed

    def update(self, transport):
        self.turn += 1
        self.dist.barrier()
        self.calls.clear()
        options = dict(group=self.group) if transport == "group" else {}
        cpu, began = time.process_time(), time.perf_counter()
        with self.client.update(
            version=f"v{self.turn}", process_group=self.dist.group.WORLD, transport=transport, **options
        ) as update:
            update.add_sharded(self.state)
        ms, cpu = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu)
        calls = list(self.calls)
        entry = self.client.json("GET", "/updates", admin=True)["updates"][0] if self.rank == 0 else {}
        return dict(ms=ms, cpu=cpu, inside=entry.get("ms", {}).get("total", 0), calls=calls)

    def profile(self, transport):
        profiler = cProfile.Profile()
        for _ in range(WARM):
            self.update(transport)
        profiler.enable()
        for _ in range(10):
            self.update(transport)
        profiler.disable()
        if self.rank == 0:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)

    def end(self, transport):
        if transport == "group":
            self.group.leave()
        elif transport == "kept":
            if self.rank == 0:
                self.client.release_kept()
            self.client.kept.clear()


def rank_main():
    rank = Rank(sys.argv[2], json.loads(pathlib.Path(sys.argv[3]).read_text()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, transport = json.loads(line)
        print(json.dumps(getattr(rank, command)(transport)), flush=True)


class Trainer:
    """The ranks of one version of refit, and its server."""

    def __init__(self, root, folder, shapes, world):
        flags = ["--device", "cpu", "--tp", 1, "--max-total-tokens", 1024, "--skip-tokenizer-init"]
        self.server = OtherServer(root, folder, flags)
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world))
        env.update(REFIT_BENCH_ROOT=str(root), OMP_NUM_THREADS="1")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", self.server.url, str(shapes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env, RANK=str(rank)),
            )
            for rank in range(world)
        ]  # fmt: skip
        self.answers()

    def answers(self):
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            raise RuntimeError(f"a rank has ended; the server's log ends with\n{self.server.tail()}")
        return [json.loads(line) for line in lines]

    def __call__(self, command, transport):
        for rank in self.ranks:
            rank.stdin.write(json.dumps([command, transport]) + "\n")
            rank.stdin.flush()
        return self.answers()[0]

    def close(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.server.kill()


class OtherServer(Server):
    def __init__(self, root, folder, flags):
        self.root = root
        super().__init__(folder, *flags)

    def arguments(self, model):
        import server

        server.PROGRAM = self.root / "bin/refit.js"
        return super().arguments(model)


def middle(found, key):
    return statistics.median(one[key] for one in found)


def told(found):
    outside = statistics.median(one["ms"] - one["inside"] for one in found)
    return f"{middle(found, 'ms'):.1f} ms, outside {outside:.1f} ms, CPU {middle(found, 'cpu'):.1f} ms"


def calls_of(found):
    """The median time of each request of an update."""
    times = {}
    for one in found:
        for name, ms in one["calls"]:
            times.setdefault(name, []).append(ms)
    return ", ".join(f"{name} {len(ms) / len(found):.0f} x {statistics.median(ms):.2f}" for name, ms in times.items())


def measure(trainers, title, transport, rounds):
    found = {name: [] for name in trainers}
    for turn in range(WARM + rounds):
        for name, trainer in trainers.items():
            result = trainer("update", transport)
            if turn >= WARM:
                found[name].append(result)
    for trainer in trainers.values():
        trainer("end", transport)
    ours, before = found["ours"], found.get("before", found["ours"])
    ratio = middle(before, "ms") / middle(ours, "ms")
    print(f"| {title}, {transport} | {told(ours)} | {told(before)} | {ratio:.2f} |", flush=True)
    for name, own in found.items():
        print(f"{name}: {calls_of(own)}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    roots = dict(ours=HERE, **({} if options.before is None else dict(before=options.before.resolve())))
    print("| figure | refit | before | ratio |\n| --- | --- | --- | --- |", flush=True)
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        config = config_of(model)
        # A request may name 4,096 files of shared memory, and here every tensor is one.
        ways = TRANSPORTS if model == "qwen3-8b" else ["group", "upload"]
        chosen = [way for way in ways if all(word in f"{model} {way}" for word in options.only)]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = models.hollow(pathlib.Path(place) / "model", config)
            names = models.tensors(config)
            shapes = pathlib.Path(place) / "shapes.json"
            shapes.write_text(json.dumps(names))
            ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
            title, trainers = f"{len(names)} tensors of {model}, {ranks}", {}
            try:
                for name, root in roots.items():
                    trainers[name] = Trainer(root, folder, shapes, options.ranks)
                for way in chosen:
                    if options.profile:
                        trainers["ours"]("profile", way)
                    else:
                        measure(trainers, title, way, options.rounds)
            finally:
                for trainer in trainers.values():
                    trainer.close()


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["--rank"] else main()
