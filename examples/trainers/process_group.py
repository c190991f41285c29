"""A process group between a trainer and its inference engines, next to the trainer's default group.

Trainers share one way to make it, known as `init_custom_process_group`: a store at an address of the trainer's, a group
on it that is not the default one and has ranks of its own. The engines are told the address, and join as the ranks that
they are told. Made with functions of torch.distributed that have been the same since torch 2.0; two of them are
private, as everywhere where this is done.
"""

import datetime
import os
import socket

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# A broadcast that an engine never joins ends with an error after this.
TIMEOUT = datetime.timedelta(minutes=5)


def init_custom_process_group(backend, init_method, world_size, rank, group_name, timeout=TIMEOUT):
    """Rank 0 opens the store at `init_method` ("tcp://host:port") and waits until all the others, engines too, have
    come to it."""
    # Under torchrun the rendezvous would expect the launcher's store at that address.
    agent = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        store, rank, world_size = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    finally:
        if agent is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = agent
    store.set_timeout(timeout)
    # Options are not passed, because their parameter has had several names.
    made = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    group = made[0] if isinstance(made, tuple) else made
    # Callers name ranks of this group itself: the engines have no rank in the trainer's default group.
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def broadcast(tensor, group, async_op=False):
    """From the trainer, which is rank 0 of the group."""
    return dist.broadcast(tensor, 0, group=group, async_op=async_op)


def free_port():
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def rank_offsets(ranks, first=1):
    """The first rank of each engine in the group, and the size of the group. ranks: the number of ranks of each engine;
    first: the number of trainers in front."""
    offsets, at = [], first
    for count in ranks:
        offsets.append(at)
        at += count
    return offsets, at
