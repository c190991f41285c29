"""A torch server's part in an update by a process group: receive the announced tensors, copy them into parameters,
synchronise.

Started by distributed_bench.py with {"device", "backend", "shapes"} on the standard input; prints its port. It uses
Python's shortest HTTP loop, so no time is a framework's. Its plain receive reads bytes into existing memory and does
not copy them.
"""

import json
import math
import pathlib
import socket
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/trainers"))
from process_group import broadcast, init_custom_process_group  # noqa: E402


class Receiver:
    def __init__(self, asked):
        self.device = torch.device(asked["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.shapes, self.backend = asked["shapes"], asked["backend"]
        self.parameters, self.buffer, self.group = None, None, None

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def init(self, body):
        place = f"tcp://{body['master_address']}:{body['master_port']}"
        self.group = init_custom_process_group(
            self.backend, place, body["world_size"], body["rank_offset"], body["group_name"]
        )

    def update(self, body):
        """Like SGLang's workers: all tensors of the request are received, then loaded."""
        if self.parameters is None:
            self.parameters = {
                name: torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for name, shape in self.shapes
            }
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        if body.get("load_format") == "flattened_bucket":
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes)]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            broadcast(flat, self.group)
            got = [
                piece.view(dtype).view(shape) for piece, dtype, shape in zip(flat.split(sizes), dtypes, body["shapes"])
            ]
        else:
            got = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in zip(body["shapes"], dtypes)]
            for work in [broadcast(tensor, self.group, async_op=True) for tensor in got]:
                work.wait()
        for name, tensor in zip(body["names"], got):
            self.parameters[name].copy_(tensor)
        self.synchronize()

    def plain(self, body):
        """Broadcasts of so many bytes each, one after another in one buffer."""
        total = sum(body["sizes"])
        if self.buffer is None or self.buffer.numel() != total:
            self.buffer = None
            self.buffer = torch.zeros(total, dtype=torch.uint8, device=self.device)
        self.synchronize()
        for work in [broadcast(piece, self.group, async_op=True) for piece in self.buffer.split(body["sizes"])]:
            work.wait()
        self.synchronize()

    def forget(self, _):
        self.parameters, self.buffer = None, None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def leave(self, _):
        dist.destroy_process_group(self.group)
        self.group = None


def main():
    receiver = Receiver(json.loads(sys.stdin.readline()))
    routes = {
        "/init_weights_update_group": receiver.init,
        "/update_weights_from_distributed": receiver.update,
        "/destroy_weights_update_group": receiver.leave,
        "/plain": receiver.plain,
        "/forget": receiver.forget,
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = connection.makefile("rb")
    while True:
        line = reader.readline()
        if not line:
            return
        path, length = line.split()[1].decode(), 0
        while line.strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
            line = reader.readline()
        body = json.loads(reader.read(length) or b"{}")
        began = time.perf_counter()
        routes[path](body)
        reply = json.dumps(dict(ms=1000 * (time.perf_counter() - began))).encode()
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(reply) + reply
        )


if __name__ == "__main__":
    main()
