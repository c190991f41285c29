"""Disaggregated updates: trainer and engines on different GPUs or hosts, one process group between them, and the
trainer broadcasts.

    refit serve models/adder-base --tp 2
    torchrun --nproc-per-node 4 examples/trainers/broadcast_style.py --bucketed

The model is sharded over all trainers (FSDP2). The first of them is rank 0 of a second group, in which the ranks of the
engines are the others: it gathers one parameter after another, announces names, dtypes and shapes over HTTP, and
broadcasts what it has announced. gloo on CPUs; NCCL with --device cuda, where trainers and engines must not share a
GPU (CUDA_VISIBLE_DEVICES of each). Several engines: --url once, --and-url for each other one.
"""

import concurrent.futures

import torch
import torch.distributed as dist

from common import arguments, buckets, full_tensors, post, ranks_of, save, sharded_model, train_step
from process_group import broadcast, free_port, init_custom_process_group, rank_offsets


def options_of(parser):
    parser.add_argument("--and-url", action="append", default=[], metavar="URL", help="another engine; once for each")
    parser.add_argument(
        "--bucketed", action="store_true", help="one broadcast of bytes for each bucket, instead of one for each tensor"
    )
    parser.add_argument("--address", default="127.0.0.1", help="where the engines reach this process")
    parser.add_argument("--group-name", default="weight_update_group")


class Engines:
    """The engines' side of a group, and the trainer's rank 0."""

    def __init__(self, urls, address, name, backend):
        self.urls, self.name = urls, name
        self.pool = concurrent.futures.ThreadPoolExecutor(len(urls))
        offsets, world = rank_offsets([ranks_of(url) for url in urls])
        place = dict(
            master_address=address, master_port=free_port(), world_size=world, group_name=name, backend=backend
        )
        # Engines wait for the store and the store waits for all ranks, so all run at once.
        joining = [
            self.pool.submit(post, url, "/init_weights_update_group", dict(place, rank_offset=offset))
            for url, offset in zip(urls, offsets)
        ]
        self.group = init_custom_process_group(backend, f"tcp://{address}:{place['master_port']}", world, 0, name)
        for joined in joining:
            joined.result()

    def ask(self, path, body):
        return [self.pool.submit(post, url, path, body) for url in self.urls]

    def all(self, path, body):
        for reply in self.ask(path, body):
            reply.result()

    def send(self, bucket, bucketed, version):
        """Tensors by name, on every engine when this returns. They are received in the order of the announcement."""
        body = dict(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group_name=self.name,
            flush_cache=False,
            weight_version=version,
        )
        tensors = [tensor.contiguous() for _, tensor in bucket]
        if bucketed:
            body["load_format"] = "flattened_bucket"
            tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
        replies = self.ask("/update_weights_from_distributed", body)
        for work in [broadcast(tensor, self.group, async_op=True) for tensor in tensors]:
            work.wait()
        for reply in replies:
            reply.result()

    def leave(self):
        replies = self.ask("/destroy_weights_update_group", dict(group_name=self.name))
        dist.destroy_process_group(self.group)
        for reply in replies:
            reply.result()


def update(model, engines, bucketed, limit, version):
    """`engines` on the first trainer; None on the others, which take part in gathering."""
    if engines:
        engines.all("/pause_generation", dict(mode="retract"))
    for bucket in buckets(full_tensors(model), limit):
        if engines:
            engines.send(bucket, bucketed, version)
    if engines:
        engines.all("/continue_generation", {})


def main():
    options = arguments(__doc__, options_of)
    model = sharded_model(options.model, options.device)
    backend = "nccl" if options.device == "cuda" else "gloo"
    engines = (
        Engines([options.url, *options.and_url], options.address, options.group_name, backend)
        if dist.get_rank() == 0
        else None
    )
    for step in range(1, options.steps + 1):
        train_step(model, step)
        update(model, engines, options.bucketed, options.bucket_mb * 1e6, f"step-{step}")
        if engines:
            print(f"step {step}: updated", flush=True)
    if engines:
        engines.leave()
    if options.save:
        save(model, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
