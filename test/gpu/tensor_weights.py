"""Weights whose bits depend on variant, name and position, and their checksums (docs/checksum.md), on any device."""

import math
import zlib

import torch


def signed(value, bits=64):
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def piece_of(device):
    """Elements to compute at once: on a CPU few enough for its caches, so no step touches new memory."""
    return 1 << (24 if device.type == "cuda" else 16)


def coded(variant, name, shape, device="cpu", out=None):
    """bfloat16 below 2 in size: neither infinity nor NaN, and float32 holds it exactly."""
    count = math.prod(shape)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device) if out is None else out
    flat = out.view(-1).view(torch.int16)
    seed = signed(zlib.crc32(name.encode()) ^ (variant * 0x9E3779B1), 32)
    piece = piece_of(out.device)
    # int32 wraps around like the 32-bit words of this hash. `>>` repeats the sign, and the masks drop the repeats.
    for start in range(0, count, piece):
        h = torch.arange(start, min(count, start + piece), dtype=torch.int32, device=out.device)
        h.mul_(signed(0x85EBCA6B, 32)).add_(seed)
        h.bitwise_xor_((h >> 13).bitwise_and_(0x7FFFF)).mul_(0x2C1B3C6D)
        flat[start : start + len(h)] = h.bitwise_xor_(h >> 16).bitwise_and_(0xBFFF).to(torch.int16)
    return out


GOLDEN, MIX1, MIX2 = (signed(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
POWERS = [signed(pow(0xD1342543DE82EF95, j, 1 << 64)) for j in range(8)]


def shifted(z, bits):
    """Unsigned shift to the right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def checksum_of(tensor):
    """A tensor of one int64, so many can be requested without waiting for each. Integers of torch wrap around."""
    bits = tensor.detach().to(torch.bfloat16).contiguous().view(-1).view(torch.int16)
    powers = torch.tensor(POWERS, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    piece = piece_of(bits.device)
    for start in range(0, bits.numel(), piece):
        b = bits[start : start + piece].to(torch.int64) & 0xFFFF
        b = torch.nn.functional.pad(b, (0, -b.numel() % 8)).view(-1, 8)
        z = torch.arange(start // 8 + 1, start // 8 + 1 + len(b), device=bits.device) * GOLDEN
        z = (z ^ shifted(z, 30)) * MIX1
        z = (z ^ shifted(z, 27)) * MIX2
        z = (z ^ shifted(z, 31)) | 1
        total += ((b * powers).sum(1) * z).sum()
    return total


def checksums_of(named):
    named = list(named)
    if not named:
        return {}
    totals = torch.stack([checksum_of(tensor).to(named[0][1].device) for _, tensor in named]).tolist()
    return {name: f"{total & ((1 << 64) - 1):016x}" for (name, _), total in zip(named, totals)}
