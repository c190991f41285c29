"""A rank of a sharded trainer: a model of transformers under FSDP2, whose shards it sends with the Python client. It
gets calls as lines of JSON and replies with lines of JSON.

Started by tensor_process.Process. Its own output goes to the standard error. All ranks get the same calls.
"""

import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

from answering import answer
from tensor_weights import checksums_of, coded

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients/python"))
import refit  # noqa: E402
from refit.blocks import Blocks  # noqa: E402


class Trainer:
    def __init__(self):
        self.clients, self.group = {}, None
        self.take = Blocks.take

    def start(self, device, rank, world, port):
        self.device, self.rank, self.world = torch.device(device), rank, world
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        else:
            torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        place = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world)
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.device.type == "cuda" else None
        return dict(pid=os.getpid(), torch=torch.__version__, nccl=nccl)

    def model(self, folder):
        """A model with the shapes of a checkpoint."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, AutoModelForCausalLM

        mesh = init_device_mesh(self.device.type, (self.world,))
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.module = model.to_empty(device=self.device)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        self.shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
        return sorted({str(tuple(t.placements)) for t in model.state_dict().values()})

    def fill(self, variant):
        """As a step of an optimizer would: in place."""
        state = self.module.state_dict()
        for name, shape in self.shapes.items():
            # torch cuts by rows, and later ranks may have none.
            parts = coded(variant, name, shape, self.device).chunk(self.world)
            if self.rank < len(parts):
                state[name].to_local().copy_(parts[self.rank])
        self.synchronize()

    def sums(self, variant):
        """By the whole tensors."""
        out = {}
        for name, shape in self.shapes.items():
            out |= checksums_of([(name, coded(variant, name, shape, self.device))])
        return out

    def update(self, url, version, transport, timeout_s=60, backend=None, also=None, **options):
        """An update from the shards; returns its seconds and its entry in the engine's list. also: more fields of the
        requests that write."""
        client = self.clients.setdefault(url, refit.Client(url))
        if transport == "group":
            if self.group is None:
                fields = dict(process_group=dist.group.WORLD, timeout_s=timeout_s, backend=backend)
                self.group = client.shard_group(**fields)
            options["group"] = self.group
        self.synchronize()
        dist.barrier()
        began = time.perf_counter()
        with client.update(version=version, process_group=dist.group.WORLD, transport=transport, **options) as update:
            update.fields.update(also or {})
            update.add_sharded(self.module)
        seconds = time.perf_counter() - began
        entry = client.json("GET", "/updates", admin=True)["updates"][0]
        return dict(seconds=seconds, entry=entry, backend=self.group and self.group.backend)

    def dies(self, chunk):
        """This rank ends when it takes a chunk of the next update to send it."""

        def take(blocks, number, turn):
            if number == chunk:
                self.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.take(blocks, number, turn)

        Blocks.take = take

    def stops(self, chunk, seconds):
        """This rank waits once before it takes a chunk of the next update."""

        def take(blocks, number, turn):
            if number == chunk:
                Blocks.take = self.take
                time.sleep(seconds)
            return self.take(blocks, number, turn)

        Blocks.take = take

    def leave(self):
        group, self.group = self.group, None
        if group is not None:
            group.leave()
        for client in self.clients.values():
            if client.kept and self.rank == 0:
                client.release_kept()
            client.kept.clear()

    def memory(self):
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    answer(Trainer())
