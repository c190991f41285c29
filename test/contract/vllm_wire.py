"""Shared by the tests of vLLM's weight transfer: an engine, a sender process, and vLLM's and SkyRL's clients."""

import http.client
import json
import pathlib
import urllib.parse

import pytest

from distributed_group import free_port
from engines import Beside
from server import Refused
from tensor_process import Process

HERE = pathlib.Path(__file__).resolve().parent
GROUP = "weight_transfer"
# Engine and trainer use different GPUs, because NCCL refuses two ranks on one.
WIRES = ["gloo", pytest.param("nccl", marks=pytest.mark.cards(2))]


class Session:
    """One keep-alive connection, as in aiohttp and requests. `headers`: those of the last reply."""

    def __init__(self, server):
        self.address, self.headers = urllib.parse.urlsplit(server.url), {}

    def request(self, method, path, body=None, headers=None, timeout=300):
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(
                method,
                path,
                data,
                {**({} if data is None else {"content-type": "application/json"}), **(headers or {})},
            )
            reply = connection.getresponse()
            text = reply.read().decode()
            self.headers = {name.lower(): value for name, value in reply.getheaders()}
            if reply.status >= 400:
                raise Refused(reply.status, text)
            return json.loads(text) if text and "json" in self.headers.get("content-type", "") else text
        finally:
            connection.close()

    def post(self, path, body=None, **more):
        return self.request("POST", path, body, **more)


class Sending:
    """A sender that has joined an engine."""

    def __init__(self, engine, wire, init, **info):
        self.engine, self.wire = engine, wire
        self.process = Process(
            {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} if wire == "gloo" else None,
            str(HERE / "vllm_sender.py"),
        )
        device = "cpu" if wire == "gloo" else f"cuda:{engine.ranks}"
        self.process("start", device=device, shapes=[[name, list(shape)] for name, shape in engine.shapes.items()])
        port, world = free_port(), 1 + engine.ranks
        fields = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=world, **info)
        if wire == "gloo":
            fields["backend"] = "gloo"
        # In either order, the request stays open until the trainer has joined.
        self.asked = Beside(lambda: init(fields))
        self.process("join", backend=wire, name=GROUP, address="127.0.0.1", port=port, world=world)
        self.initialised = self.asked.result()

    def send(self, update, variant, names, limit=None, dtypes=None):
        """Posts by `update` and broadcasts meanwhile. Returns the reply or the refusal."""
        asked = Beside(lambda: update(self.lists(names, dtypes)))
        self.process.begin("send", variant=variant, names=names, limit=limit, dtypes=dtypes)
        self.sizes = self.process.end()
        return asked.result()

    def lists(self, names, dtypes=None):
        return dict(
            names=names,
            dtype_names=[(dtypes or {}).get(name, "bfloat16") for name in names],
            shapes=[list(self.engine.shapes[name]) for name in names],
        )

    def close(self):
        self.process.kill()


def on_cards(wire):
    return "cpu" if wire == "gloo" else "cuda"


__all__ = ["GROUP", "HERE", "WIRES", "Sending", "Session", "on_cards"]
