"""Colocated updates as verl does them: whole tensors, gathered one parameter at a time, handles of every rank in one
request per bucket.

refit serve models/adder-base --tp 2
torchrun --nproc-per-node 4 examples/trainers/verl_style.py
"""

from dataclasses import dataclass

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
class LocalSerializedTensor:
    """verl uses SGLang's class of this name; servers recognise the name. One pickled tensor per tensor-parallel
    rank."""

    values: list


def update(model, url, ranks, limit):
    rank = dist.get_rank()
    for bucket in buckets(full_tensors(model), limit):
        # Every tensor-parallel rank reads the memory of one process; the first process speaks for all.
        handles = gather([(name, pickled(tensor)) for name, tensor in bucket] if rank < ranks else None, ranks)
        if rank == 0:
            named = [(own[0][0], LocalSerializedTensor([data for _, data in own])) for own in zip(*handles)]
            post(
                url,
                "/update_weights_from_tensor",
                {"serialized_named_tensors": [text(pickled(named))] * ranks, "load_format": None},
            )
        answered()


def main():
    options = arguments(__doc__)
    model = sharded_model(options.model, options.device)
    ranks = ranks_of(options.url)
    assert ranks <= dist.get_world_size(), "each tensor-parallel rank reads from a process of its own"
    for step in range(1, options.steps + 1):
        train_step(model, step)
        update(model, options.url, ranks, options.bucket_mb * 1e6)
        if dist.get_rank() == 0:
            post(options.url, "/update_weight_version", {"new_version": f"step-{step}", "abort_all_requests": False})
            print(f"step {step}: updated", flush=True)
        dist.barrier()
    if options.save:
        save(model, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
