"""checkpoint-engine's parameter server as an engine sees it, with the message order of its ps.py.

It has a rank for each GPU. Each rank has a REQ socket and a buffer with two halves that it fills in turn. A bucket is
sent once all ranks have their replies. No socket is closed before the HTTP request has ended. On CPUs the buffers are
shared memory; checkpoint-engine itself has none there.
"""

import io
import itertools
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from zmq_req import Gone, Req

ALIGN = 256
COUNTER = itertools.count()


class WorkersFailed(Exception):
    """The error that a worker sent instead of an empty reply."""


def aligned(tensor):
    return (tensor.nbytes + ALIGN - 1) // ALIGN * ALIGN


def cut(named, bucket_bytes):
    buckets, size = [], 0
    for name, tensor in named:
        if not buckets or size + aligned(tensor) > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += aligned(tensor)
    return buckets


def card_uuid(device):
    return f"GPU-{torch.cuda.get_device_properties(device).uuid!s}"


def dumps(obj):
    """Pickles like pyzmq's send_pyobj; CPU tensors become handles."""
    if not isinstance(obj, tuple) or obj[0].__name__ == "rebuild_cuda_tensor":
        return pickle.dumps(obj, -1)
    buffer = io.BytesIO()
    ForkingPickler(buffer, -1).dump(obj)
    return buffer.getvalue()


class ParameterServer:
    """`devices`: one for each rank. `keys`: the ranks' names (default: the GPUs' UUIDs; `cpu`, `cpu:1`, ...)."""

    def __init__(
        self,
        devices=("cpu",),
        bucket_bytes=1 << 20,
        *,
        keys=None,
        path="@checkpoint-engine-{key}-{counter}.sock",
        kind=None,
        timeout_s=120,
    ):
        self.devices, self.bucket_bytes, self.kind, self.timeout_s = (
            [torch.device(device) for device in devices],
            bucket_bytes,
            kind,
            timeout_s,
        )
        self.keys = keys or [
            card_uuid(device) if device.type == "cuda" else f"cpu{':%d' % rank if rank else ''}"
            for rank, device in enumerate(self.devices)
        ]
        self.path = path
        # Called before each message: (rank, what, index) -> the message to send instead, or None.
        self.change = lambda rank, what, index: None

    def update(self, named, request):
        """`request({key: endpoint})` makes the HTTP call.

        It runs beside the exchange, as in ps.py. Returns its result.
        """
        counter = f"{os.getpid()}-{next(COUNTER)}"
        endpoints = {key: "ipc://" + self.path.format(key=key, counter=counter) for key in self.keys}
        size = max(self.bucket_bytes, *(aligned(tensor) for _, tensor in named))
        buckets = cut(named, self.bucket_bytes)
        together = threading.Barrier(len(self.devices))
        codes, outcome, errors, ready = [0] * len(self.devices), {}, [], threading.Barrier(len(self.devices) + 1)
        answered = threading.Event()

        def rank_thread(rank):
            try:
                self.rank(rank, endpoints[self.keys[rank]], size, buckets, together, codes, ready, answered)
            except threading.BrokenBarrierError:
                pass
            except Exception as error:  # noqa: BLE001
                errors.append(error)
                together.abort()
                ready.abort()

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(len(self.devices))]
        for thread in threads:
            thread.start()
        try:
            ready.wait(self.timeout_s)
            outcome["reply"] = request(endpoints)
        finally:
            answered.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return outcome["reply"]

    def rank(self, rank, endpoint, size, buckets, together, codes, ready, answered):
        device = self.devices[rank]
        buffer = torch.empty(2 * size, dtype=torch.uint8, device=device)
        handle = reduce_tensor(buffer)
        socket = Req(endpoint, self.timeout_s, self.kind)

        def send(what, obj, index=0):
            data = self.change(rank, what, index)
            socket.send(dumps(obj) if data is None else data)

        try:
            ready.wait(self.timeout_s)
            send("handle", handle)
            for index, bucket in enumerate(buckets):
                start = at = index % 2 * size
                metas = []
                for name, tensor in bucket:
                    buffer[at : at + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8).to(device)
                    metas.append(dict(name=name, dtype=tensor.dtype, shape=tensor.shape, offset=at))
                    at += aligned(tensor)
                assert at - start <= size
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                reply = socket.recv()
                codes[rank] = reply
                # As with an all_reduce, an error of one rank is an error of all.
                together.wait(self.timeout_s)
                failed = [code.decode() for code in codes if code]
                together.wait(self.timeout_s)
                if failed:
                    send("stop", RuntimeError("Some workers failed to update weights"))
                    raise WorkersFailed(failed[0])
                send("bucket", metas, index)
            last = socket.recv()
            if last:
                # checkpoint-engine ignores this reply.
                codes[rank] = last
            send("none", None)
            socket.recv()
            del buffer, handle
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.ipc_collect()
            send("none", None, 1)
            socket.recv()
            if last:
                raise WorkersFailed(last.decode())
        finally:
            try:
                if not answered.wait(self.timeout_s):
                    raise Gone("the HTTP request is still open after the last message")
            finally:
                socket.close()


__all__ = ["Gone", "ParameterServer", "WorkersFailed"]
