"""The digest of an adapter, as an engine computes it of what it holds (docs/adapters.md)."""

import hashlib
import math
import re
import struct
from decimal import Decimal

HALF = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?$")
EXPERTS = re.compile(r"^(.+\.experts)(\.base_layer)?$")


class AdapterDigest:
    """Collects checksums tensor by tensor. dtype: the engine's, to which it rounds, such as "bfloat16"."""

    def __init__(self, config, dtype):
        self.config, self.dtype = config, dtype
        # {module: [rank, scale, checksum of A, checksum of B]}; halves of fused experts wait for each other.
        self.modules, self.fused = {}, {}

    def add(self, name, tensor):
        """Adds a tensor by PEFT's name. Names that are no half of an adapter are left to the engine to refuse."""
        match = HALF.match(name)
        if match is None:
            return
        module, embedding, half = match.groups()
        experts = EXPERTS.match(module)
        if experts is not None:
            halves = self.fused.setdefault(module, {})
            halves[half] = tensor
            if len(halves) == 2:
                self.split(experts[1], experts[2] is not None, **self.fused.pop(module))
            return
        # An engine holds an embedding's A by tokens.
        self.note(module, half, tensor.t() if embedding and half == "A" else tensor, self.shape(module))

    def note(self, module, half, tensor, shape):
        import torch

        stored = tensor.detach().to(getattr(torch, self.dtype)).cpu().contiguous()
        bits = stored.view(torch.int32 if stored.element_size() == 4 else torch.int16).numpy()
        self.modules.setdefault(module, [*shape, None, None])["AB".index(half) + 2] = checksum(bits)

    def split(self, experts, inner, A, B):
        """Fused experts as single ones: A is [experts * rank, in], B is [out, rank * experts]."""
        targets = [str(name).rsplit(".", 1)[-1] for name in self.config.get("target_parameters") or ()]
        # gate_up_proj is the inner one of two.
        is_gate_up = inner or targets == ["gate_up_proj"]
        rank, scale = self.shape(f"{experts}.{'gate_up_proj' if is_gate_up else 'down_proj'}")
        out, count = B.shape[0], A.shape[0] // rank
        parts = {"down_proj": slice(out)}
        if is_gate_up:
            parts = {"gate_proj": slice(out // 2), "up_proj": slice(out // 2, out)}
        for expert in range(count):
            for part, rows in parts.items():
                module = f"{experts}.{expert}.{part}"
                self.note(module, "A", A[expert * rank : (expert + 1) * rank], (rank, scale))
                self.note(module, "B", B.reshape(out, rank, count)[rows, :, expert], (rank, scale))

    def shape(self, module):
        """(rank, scale) of a module by the configuration."""
        rank = pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def value(self):
        """16 hex digits, once all tensors have been added."""
        lines = [
            f"{module} {rank} {number(scale)} {sum_a} {sum_b}\n"
            for module, (rank, scale, sum_a, sum_b) in self.modules.items()
        ]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def pattern(patterns, module, default):
    """PEFT's search: the first key, a regular expression, that fits the module's name or its end."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def number(value):
    """A float32 as JavaScript writes it."""
    value = struct.unpack("f", struct.pack("f", value))[0]
    if value == int(value):
        return str(int(value))
    text = repr(value)
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    return f"{Decimal(text):f}" if int(exponent) >= -6 else f"{digits}e{int(exponent)}"


def checksum(bits):
    """docs/checksum.md. bits: the stored elements as a numpy integer array of their width."""
    import numpy as np

    b = bits.reshape(-1).view(f"u{bits.itemsize}").astype(np.uint64)
    b = np.pad(b, (0, -b.size % 8)).reshape(-1, 8)
    powers = np.array([pow(0xD1342543DE82EF95, j, 1 << 64) for j in range(8)], dtype=np.uint64)
    z = np.arange(1, len(b) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return f"{int(((b * powers).sum(axis=1, dtype=np.uint64) * z).sum(dtype=np.uint64)):016x}"
