"""The other end of a benchmark's process group, over HTTP: a server, or processes of torch."""

import concurrent.futures
import gc
import http.client
import json
import pathlib
import sys
import time

import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
sys.path.insert(0, str(ROOT / "examples/trainers"))
from distributed_group import DESTROY, INIT, free_port  # noqa: E402
from process_group import broadcast, init_custom_process_group  # noqa: E402


class Client:
    """One connection that stays open, as a trainer's."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)

    def send(self, path, data):
        self.connection.request("POST", path, data, {"content-type": "application/json"})

    def receive(self, path):
        reply = self.connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status}: {text.decode(errors='replace')[:800]}")
        return json.loads(text)

    def post(self, path, body):
        """(milliseconds, reply)."""
        data = json.dumps(body).encode()
        began = time.perf_counter()
        self.send(path, data)
        reply = self.receive(path)
        return 1000 * (time.perf_counter() - began), reply


class Side:
    """The other end of a group: one server with all its ranks, or a process of torch for each rank."""

    def __init__(self, name, clients, ranks, options):
        self.name, self.clients, self.ranks, self.options = name, clients, ranks, options
        self.pool = concurrent.futures.ThreadPoolExecutor(len(clients))
        self.group = None

    def ask(self, path, body):
        return [self.pool.submit(client.post, path, body) for client in self.clients]

    def join(self, pause_s=0.0):
        """All ranks join; milliseconds of the slowest reply."""
        port, world = free_port(), 1 + self.ranks
        place = dict(
            master_address="127.0.0.1",
            master_port=port,
            world_size=world,
            group_name=self.name,
            backend=self.options.backend,
        )
        each = self.ranks // len(self.clients)
        with concurrent.futures.ThreadPoolExecutor(1) as own:
            mine = own.submit(
                init_custom_process_group, self.options.backend, f"tcp://127.0.0.1:{port}", world, 0, self.name
            )
            time.sleep(pause_s)
            asked = [
                self.pool.submit(client.post, INIT, dict(place, rank_offset=1 + each * index))
                for index, client in enumerate(self.clients)
            ]
            self.group = mine.result(120)
            return max(reply.result()[0] for reply in asked)

    def leave(self):
        asked = self.ask(DESTROY, dict(group_name=self.name))
        dist.destroy_process_group(self.group)
        self.group = None
        gc.collect()
        for reply in asked:
            reply.result()

    def broadcast(self, tensors):
        for work in [broadcast(tensor, self.group, async_op=True) for tensor in tensors]:
            work.wait()
        self.options.synchronize()

    def request(self, path, body, tensors):
        """One request and its broadcasts: (milliseconds until both sides are done, replies). The body's text is the
        trainer's work."""
        data = json.dumps(body).encode()
        began = time.perf_counter()
        for client in self.clients:
            client.send(path, data)
        self.broadcast(tensors)
        replies = [client.receive(path) for client in self.clients]
        return 1000 * (time.perf_counter() - began), replies

    def plain(self, tensors):
        """The broadcasts alone: the receivers wait in them already."""
        asked = self.ask("/plain", dict(sizes=[tensor.numel() for tensor in tensors]))
        time.sleep(0.05)
        self.options.synchronize()
        began = time.perf_counter()
        self.broadcast(tensors)
        ms = 1000 * (time.perf_counter() - began)
        for reply in asked:
            reply.result()
        return ms
