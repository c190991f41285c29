"""Shared by the process group tests: long-lived trainers, servers by kind and ranks, and the checks after an update."""

import os

import models
from distributed_group import Group, trainer
from server import Server
from tensors import MODELS, Model, coded_checksum

# Seconds that a server waits for a peer before it gives up the group, in tests that wait for it. It is more than a busy
# machine keeps a trainer from running.
DEADLINE_S = 10
WIDE = dict(
    models.REAL["qwen3-8b"],
    hidden_size=1024,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=3072,
    vocab_size=24576,
    tie_word_embeddings=True,
)


class Hollow:
    """A model of some 90 MB, received in two pieces. Its checkpoint is all zeros."""

    def __init__(self, folder):
        self.folder = models.hollow(folder / "wide", WIDE)
        self.shapes = dict(models.tensors(WIDE))

    def checksums(self, variant):
        return {name: coded_checksum(variant, name, tuple(shape)) for name, shape in self.shapes.items()}


class Party:
    """Trainers and servers that tests reuse."""

    def __init__(self, folder, deadline_s):
        self.folder, self.deadline_s = folder, deadline_s
        self.trainers, self.servers, self.models, self.sums = [], {}, {}, {}

    def model(self, kind):
        if kind not in self.models:
            self.models[kind] = Hollow(self.folder(kind)) if kind == "wide" else Model(kind, self.folder(kind))
        return self.models[kind]

    def checksums(self, kind, variant):
        if (kind, variant) not in self.sums:
            self.sums[kind, variant] = self.model(kind).checksums(variant)
        return self.sums[kind, variant]

    def server(self, kind, ranks=1, which="a", *flags):
        key = (kind, ranks, which, flags)
        if key not in self.servers:
            common = [
                "--dtype",
                "bfloat16",
                "--tp",
                ranks,
                "--threads",
                2,
                "--max-total-tokens",
                512,
                "--skip-tokenizer-init",
                "--group-timeout",
                self.deadline_s,
            ]
            self.servers[key] = Server(self.model(kind).folder, *common, *flags)
        return self.servers[key]

    def trainers_for(self, kind, count):
        for process in [process for process in self.trainers if not process.usable]:
            process.kill()
            self.trainers.remove(process)
        while len(self.trainers) < count:
            self.trainers.append(trainer({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}))
        chosen = self.trainers[:count]
        for process in chosen:
            process.begin(
                "start", device="cpu", shapes=[[name, list(shape)] for name, shape in self.model(kind).shapes.items()]
            )
        for process in chosen:
            process.end()
        return chosen

    def group(self, kind, layout, *flags, **more):
        """A group with all members of a layout (distributed_group.py). None has joined yet."""
        engines = {
            letter: self.server(kind, layout.count(letter), letter, *flags) for letter in sorted(set(layout) - {"t"})
        }
        return Group(layout, engines, self.trainers_for(kind, layout.count("t")), self.model(kind).shapes, **more)

    def spoil(self, group):
        """Resets the weights of every engine."""
        for server in group.engines.values():
            server.post("/weights_checker", dict(action="reset_tensors"))

    def holds(self, group, kind, variant):
        """Checks that all engines hold a variant completely and report no torn weights."""
        wanted = self.checksums(kind, variant)
        for letter, server in group.engines.items():
            got = server.checksums()
            wrong = [name for name in wanted if got.get(name) != wanted[name]]
            assert got.keys() == wanted.keys() and not wrong, (
                f"engine {letter}: {len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}"
            )
            assert server.metric("refit:weights_torn") == 0

    def close(self):
        for process in self.trainers:
            process.close()
        for server in self.servers.values():
            server.stop()


def footprint(pid):
    """The numbers of file descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


__all__ = ["DEADLINE_S", "MODELS", "Party", "footprint"]
