"""A trainer's process: holds tensors, packs them, posts them. It gets calls as lines of JSON and replies with lines of
JSON.

Started by tensor_process.Process. Its own output goes to the standard error.
"""

import gc
import http.client
import json
import os
import time

import torch

import tensor_payloads as payloads
from answering import answer


class Sender:
    def __init__(self):
        self.named = []
        self.extra = []
        self.loops = 0

    def start(self, device, devices, config, shapes):
        """`devices`: the device of each rank's process."""
        self.device = torch.device(device)
        self.shapes = [(name, tuple(shape)) for name, shape in shapes]
        self.packer = payloads.Packer(config, devices)
        self.named = []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        else:
            torch.set_num_threads(1)
        return dict(pid=os.getpid(), torch=torch.__version__)

    def make(self, variant, place="ordinary"):
        """Tensors of a variant, in new memory."""
        self.named = (payloads.pooled if place == "pooled" else payloads.ordinary)(variant, self.shapes, self.device)
        self.synchronize()

    def fill(self, variant):
        """The same tensors with another variant's values."""
        for name, tensor in self.named:
            payloads.coded(variant, name, tensor.shape, out=tensor)
        self.synchronize()

    def spoil(self):
        """Overwrites all sent tensors at once."""
        for tensor in [tensor for _, tensor in self.named] + list(tensors_in(self.packer.held)):
            tensor.detach().view(torch.uint8).fill_(
                0x7F
            ) if tensor.is_contiguous() and tensor.dim() > 0 else tensor.detach().fill_(1)
        self.synchronize()

    def sums(self, variant):
        """{name: checksum} of a variant."""
        return payloads.checksums_of(
            (name, payloads.coded(variant, name, shape, self.device)) for name, shape in self.shapes
        )

    def pack(self, way, ranks):
        return [
            dict(serialized_named_tensors=texts, load_format=load_format)
            for texts, load_format in self.packer.pack(way, self.named, ranks)
        ]

    def pack_only(self, names, by_uuid=False):
        """A list of some tensors, under other names ({name: sent as})."""
        return payloads.serialize(
            [
                (names[name] if isinstance(names, dict) else name, tensor)
                for name, tensor in self.named
                if name in names
            ],
            by_uuid,
        )

    def pack_lie(self, lie):
        """All tensors, as (function, args), with a wrong argument."""
        pairs = []
        for name, tensor in self.named:
            function, args = payloads.as_tuple(tensor)
            args = list(args)
            match lie:
                case "handle":
                    args[7] = args[7][:2] + bytes(range(1, 65)) if len(args[7]) == 66 else bytes(range(1, 65))
                case "beyond":
                    args[9] += 1 << 31
                case "far":
                    args[9] += 1 << 40
                case "event":
                    args[13] = bytes(range(64, 128))
                case "uuid":
                    args[6] = "00000000-1111-2222-3333-444444444444"
                case "counter":
                    args[11] = b"/torch_1_2_3"
            pairs.append((name, (function, tuple(args))))
        return payloads.serialize(pairs)

    def pack_late(self, variant, ranks, seconds):
        """Packed at once, but filled after a slow kernel: only the events of the handles show when."""
        source = payloads.ordinary(variant, self.shapes, self.device)
        for _, tensor in self.named:
            tensor.fill_(float("nan"))
        self.synchronize()
        stream = torch.cuda.Stream()
        cycles = int(seconds * cycles_per_second())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            for (_, tensor), (_, wanted) in zip(self.named, source):
                tensor.copy_(wanted)
            self.done = torch.cuda.Event()
            self.done.record(stream)
            requests = self.pack("list", ranks)
        self.extra = source
        return dict(requests=requests, pending=not self.done.query())

    def is_done(self):
        return self.done.query()

    def crowd(self, count):
        """Handles of other tensors that are never released: torch has 1,000 events for the handles of a process, and
        then waits itself."""
        self.extra = [torch.zeros(1, device=self.device) for _ in range(count)]
        payloads.dumps(self.extra)

    def shares(self):
        return dict(
            left={str(value): count for value, count in payloads.SHARES.left().items()},
            kinds=payloads.SHARES.kinds(),
            count=len(payloads.SHARES.counters),
        )

    def forget(self):
        """Forgets earlier handles."""
        payloads.SHARES.counters.clear()
        payloads.SHARES.handles.clear()

    def drop(self):
        """Frees everything, and reports what is left."""
        self.named, self.packer.held, self.extra = [], [], []
        return self.memory()

    def memory(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        held = (
            dict(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
            if self.device.type == "cuda"
            else {}
        )
        return dict(
            held,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=line_count("/proc/self/maps"),
        )

    def loop(self, port, count, ways, ranks):
        """Updates of two variants in turn over one connection, as in a trainer's steps. Every 7th is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        variants = [payloads.ordinary(variant, self.shapes, self.device) for variant in (1, 2)]
        for _ in range(count):
            self.loops += 1
            self.named = variants[self.loops % 2]
            way = ways[self.loops % len(ways)]
            refused = self.loops % 7 == 0
            # A packed payload must be posted: only the server releases its references.
            bodies = [self.unknown()] if self.loops % 14 == 7 else self.pack(way, ranks)
            if self.loops % 14 == 0:
                bodies = [dict(body, weight_version=3) for body in bodies]
            for body in bodies:
                status, reply = posted(connection, body)
                if (status == 200) == refused or status not in (200, 400):
                    raise RuntimeError(
                        f"update {self.loops} ({way}{', to be refused' if refused else ''}) was answered {status}: "
                        f"{reply[:500]}"
                    )
        # The last one is whole.
        self.named = variants[0]
        for body in self.pack("list", ranks):
            status, reply = posted(connection, body)
            if status != 200:
                raise RuntimeError(f"the last update was answered {status}: {reply[:500]}")
        connection.close()
        del variants
        return self.drop()

    def unknown(self):
        self.extra = [*self.named, ("nobody", torch.zeros(4, dtype=torch.bfloat16, device=self.device))]
        return dict(serialized_named_tensors=[payloads.serialize(self.extra)])

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def posted(connection, body):
    connection.request("POST", "/update_weights_from_tensor", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(errors="replace")


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def cycles_per_second():
    """The cycles per second of torch.cuda._sleep on this GPU, measured, because clocks change."""
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(50_000_000)
    torch.cuda.synchronize()
    return 50_000_000 / (time.perf_counter() - began)


def line_count(path):
    with open(path) as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    answer(Sender(), collect=False)
