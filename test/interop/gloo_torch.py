"""One rank of a gloo group in torch. test_gloo.py sends it one command a line."""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

torch.set_num_threads(1)
pg = None


def data(seed, count):
    return numpy.random.default_rng(seed).integers(0, 256, count, dtype=numpy.uint8)


def join(port, name, rank, size):
    global pg
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    pg = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timedelta(seconds=120))


def broadcast(root, seed, parts, at_once=False, end=None):
    """`seed`: None for zeros. `end`: the signal that this process gets once the first part has begun."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    mine = pg.rank() == root
    tensors = [
        torch.from_numpy(data(seed + i, count)) if mine and seed is not None else torch.zeros(count, dtype=torch.uint8)
        for i, count in enumerate(parts)
    ]
    works = []
    for tensor in tensors:
        works.append(pg.broadcast([tensor], options))
        if end is not None:
            os.kill(os.getpid(), getattr(signal, end))
        if not at_once:
            works[-1].wait()
    for work in works:
        work.wait()
    return {"sums": [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]}


def barrier():
    pg.barrier().wait()


def allreduce():
    pg.allreduce([torch.zeros(4)]).wait()


def leave():
    global pg
    pg = None


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = globals()[request.pop("command")](**request) or {}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
