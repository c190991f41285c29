"""Shared by the tests of published deltas: a trainer that diffs against its last version, and checks of engines."""

import hashlib
import zlib

import safetensors
import torch
import xxhash

from engines import GOLDENS
from tensors import checksum, coded

KIND = "qwen3"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def data_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Publisher:
    """`snapshot`: the last published tensors by name, at first those of the checkpoint that engines start with."""

    def __init__(self, kind=KIND):
        self.base, self.version, self.snapshot = GOLDENS / kind, 0, {}
        for path in sorted(self.base.glob("*.safetensors")):
            with safetensors.safe_open(path, "pt") as opened:
                self.snapshot.update((name, opened.get_tensor(name)) for name in opened.keys())

    def next(self, share=0.02):
        """Changes some elements of some tensors."""
        generator = torch.Generator().manual_seed(self.version)
        new = {}
        for index, (name, tensor) in enumerate(self.snapshot.items()):
            mask = torch.rand(tensor.shape, generator=generator) < (share if index % 3 else 0)
            new[name] = torch.where(mask, coded(self.version + 10, name, tensor.shape), tensor)
        return new


def holds(engine, tensors):
    got = engine.checksums()
    wrong = [name for name, tensor in tensors.items() if got[name] != checksum(tensor)]
    assert not wrong, f"{len(wrong)} tensors are not those of the trainer: {wrong[:5]}"
