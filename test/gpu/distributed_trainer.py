"""A trainer's process in process groups: holds tensors and broadcasts them. It gets calls as lines of JSON and replies
with lines of JSON.

Started by tensor_process.Process. Its own output goes to the standard error.
"""

import contextlib
import datetime
import gc
import os
import pathlib
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import tensor_payloads as payloads
from answering import answer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/trainers"))
from process_group import broadcast, init_custom_process_group  # noqa: E402


class Trainer:
    def __init__(self):
        self.groups = {}
        self.backends = {}
        self.named, self.made, self.prepared = {}, None, None

    def start(self, device, shapes):
        """Prepares for a test: nothing of the previous test is left."""
        for group in list(self.groups):
            with contextlib.suppress(Exception):
                self.leave(group)
        self.device = torch.device(device)
        self.shapes = {name: tuple(shape) for name, shape in shapes}
        self.named, self.made, self.prepared = {}, None, None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        else:
            torch.set_num_threads(1)
        return dict(
            pid=os.getpid(),
            torch=torch.__version__,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if self.device.type == "cuda" else None,
        )

    def make(self, variant):
        """All tensors with a variant's values, in the same memory each time."""
        if self.made == variant:
            return
        for name, shape in self.shapes.items():
            self.named[name] = payloads.coded(variant, name, shape, self.device, self.named.get(name))
        self.made = variant
        self.synchronize()

    def sums(self, variant):
        """{name: checksum} of a variant, without a second copy of all tensors."""
        return payloads.checksums_of(
            (name, payloads.coded(variant, name, shape, self.device)) for name, shape in self.shapes.items()
        )

    def join(self, group, address, port, rank, world, backend, timeout_s=60):
        """Returns when all ranks have joined the store."""
        began = time.monotonic()
        timeout = datetime.timedelta(seconds=timeout_s)
        self.groups[group] = init_custom_process_group(backend, f"tcp://{address}:{port}", world, rank, group, timeout)
        self.backends[group] = backend
        return time.monotonic() - began

    def prepare(self, variant, names=None, way="each", dtype=None, dtypes=None, instead=None, root=True):
        """Prepares the tensors that `send` broadcasts: those of a variant, in the order of `names`. `way`: each
        (asynchronous, then awaited together), one-by-one, bucket. `dtype`: of all. `dtypes`: {name: dtype} and
        `instead`: {name: shape} that are sent instead. Ranks other than the first (`root` false) receive, and count
        wrong values."""
        names = list(self.shapes) if names is None else names
        if root:
            self.make(variant)
        wanted = [
            (self.named[name] if root else payloads.coded(variant, name, self.shapes[name], self.device))
            for name in names
        ]
        for index, name in enumerate(names):
            if name in (instead or {}):
                wanted[index] = torch.zeros(instead[name], dtype=wanted[index].dtype, device=self.device)
            kind = (dtypes or {}).get(name, dtype)
            if kind is not None:
                wanted[index] = wanted[index].to(getattr(torch, kind))
        if way == "bucket":
            wanted = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in wanted])] if wanted else []
        mine = wanted if root else [torch.full_like(tensor, 7) for tensor in wanted]
        self.prepared = way, mine, wanted
        self.synchronize()

    def send(self, group, signal_after=None, number="SIGKILL"):
        """Broadcasts the prepared tensors. `signal_after`: seconds after which this process gets a signal."""
        way, mine, wanted = self.prepared
        if signal_after is not None:
            threading.Timer(signal_after, lambda: os.kill(os.getpid(), getattr(signal, number))).start()
        began = time.monotonic()
        if way == "one-by-one":
            for tensor in mine:
                broadcast(tensor, self.groups[group])
        else:
            for work in [broadcast(tensor, self.groups[group], async_op=True) for tensor in mine]:
                work.wait()
        self.synchronize()
        seconds = time.monotonic() - began
        wrong = sum(
            not torch.equal(got.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))
            for got, sent in zip(mine, wanted)
            if got is not sent
        )
        return dict(seconds=seconds, wrong=wrong)

    def barrier(self, group):
        dist.barrier(self.groups[group])

    def leave(self, group, abort=False):
        """The store ends with the group, so no reference to it may remain."""
        made = self.groups.pop(group)
        if abort and self.backends[group] == "nccl":
            made.abort()
        dist.destroy_process_group(made)
        del made
        gc.collect()

    def memory(self):
        gc.collect()
        held = dict(descriptors=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            held.update(card=total - free)
        return held

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    answer(Trainer())
