"""What the tests of published deltas share: a trainer that diffs against what it has published last, and what engines must hold of it."""

import hashlib
import zlib

import safetensors
import torch
import xxhash

from engines import GOLDENS
from tensors import checksum, coded

KIND = "qwen3"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(), "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}  # fmt: skip


def data_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Publisher:
    """`snapshot`, by name, is what was published last; it begins as the checkpoint that the engines were started with."""

    def __init__(self, kind=KIND):
        self.base, self.version, self.snapshot = GOLDENS / kind, 0, {}
        for path in sorted(self.base.glob("*.safetensors")):
            with safetensors.safe_open(path, "pt") as opened:
                self.snapshot.update((name, opened.get_tensor(name)) for name in opened.keys())

    def next(self, share=0.02):
        """New weights: some elements of some tensors."""
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
