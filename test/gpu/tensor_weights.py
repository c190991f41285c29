"""Weights whose bits depend on variant, name and position, and their checksums (docs/checksum.md), on any device."""

import math
import zlib

import torch


def coded(variant, name, shape, device="cpu", out=None):
    """bfloat16 below 2 in size: neither infinity nor NaN, and float32 holds it exactly."""
    count = math.prod(shape)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device) if out is None else out
    flat = out.view(-1)
    seed = (zlib.crc32(name.encode()) ^ (variant * 0x9E3779B1)) & 0xFFFFFFFF
    for start in range(0, count, 1 << 24):
        index = torch.arange(start, min(count, start + (1 << 24)), device=out.device)
        h = (index * 0x85EBCA6B + seed) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0x2C1B3C6D) & 0xFFFFFFFF
        bits = (h ^ (h >> 16)) & 0xBFFF
        flat[start : start + len(index)] = (
            torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)
        )
    return out


def signed(value):
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


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
    piece = 1 << 24
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
