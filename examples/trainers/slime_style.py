"""Colocated updates as slime does them: buckets by bytes, each flattened into one tensor, while generation is paused.

refit serve models/adder-base --tp 2
torchrun --nproc-per-node 4 examples/trainers/slime_style.py --bucket-mb 0.5
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from common import (
    answered,
    arguments,
    buckets,
    full_tensors,
    gather,
    pickled,
    post,
    ranks_of,
    save,
    sharded_model,
    text,
    train_step,
)


@dataclass
class FlattenedTensorMetadata:
    """slime uses SGLang's class of this name; servers recognise the name. Indices are bytes of the flat tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def flatten(bucket):
    pieces = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    metadata, at = [], 0
    for (name, tensor), piece in zip(bucket, pieces):
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + piece.numel(), piece.numel())
        )
        at += piece.numel()
    return {"flattened_tensor": torch.cat(pieces), "metadata": metadata}


def update(model, url, ranks, limit, version):
    rank = dist.get_rank()
    if rank == 0:
        post(url, "/pause_generation", {"mode": "abort"})
        post(url, "/flush_cache", {})
    for bucket in buckets(full_tensors(model), limit):
        flat = flatten(bucket) if rank < ranks else None
        handles = gather(text(pickled(flat)) if flat else None, ranks)
        if rank == 0:
            body = {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": version,
            }
            post(url, "/update_weights_from_tensor", body)
        answered()
    if rank == 0:
        post(url, "/continue_generation", {})


def main():
    options = arguments(__doc__)
    model = sharded_model(options.model, options.device)
    ranks = ranks_of(options.url)
    assert ranks <= dist.get_world_size(), "each tensor-parallel rank reads from a process of its own"
    for step in range(1, options.steps + 1):
        train_step(model, step)
        update(model, options.url, ranks, options.bucket_mb * 1e6, f"step-{step}")
        if dist.get_rank() == 0:
            print(f"step {step}: updated", flush=True)
    if options.save:
        save(model, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
