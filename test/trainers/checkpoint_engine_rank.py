"""A rank of checkpoint-engine's own parameter server. Commands and replies are JSON.

There are no GPUs: the buffers are shared memory, the group is over gloo, and functions of the device return figures of
a small GPU.
"""

import json
import logging
import os
import types
import urllib.error
import urllib.request

import released

released.bare("checkpoint-engine", "checkpoint_engine")
released.replace("loguru", logger=logging.getLogger("checkpoint-engine"))

import checkpoint_engine.ps as ps  # noqa: E402
import torch  # noqa: E402
import zmq  # noqa: E402
from answering import answer  # noqa: E402
from parameter_server import dumps  # noqa: E402
from tensors import coded  # noqa: E402

torch_empty = torch.empty
torch.empty = lambda *sizes, pin_memory=False, **options: torch_empty(*sizes, **options)
zmq.Socket.send_pyobj = lambda socket, message: socket.send(dumps(message))


class Device(types.SimpleNamespace):
    """torch.cuda of a machine whose GPUs have 6 MB each."""

    def __getattr__(self, name):
        return lambda *_: 0

    def device_count(self):
        return int(os.environ["WORLD_SIZE"])

    def get_device_properties(self, index):
        return types.SimpleNamespace(uuid=f"{os.getpid()}-{index}")

    def mem_get_info(self):
        return 6 << 20, 6 << 20


ps.DeviceManager = lambda: types.SimpleNamespace(device_type="cpu", backend="gloo", device_module=Device())


class Rank:
    def start(self, rank, world, port, url, shapes):
        self.url, self.shapes, self.rank = url, shapes, rank
        address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port - 1))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), **address)
        self.server = ps.ParameterServer(auto_pg=True)

    def update(self, name, variant, wrong=None):
        """`wrong`: a tensor that gets a shape of its own. Rank 0 owns the weights, and makes the request as
        checkpoint-engine's examples do. Returns the HTTP status, and whether the parameter server noticed a failure.
        """
        weights = {key: coded(variant, key, shape) for key, shape in self.shapes}
        if wrong is not None:
            weights[wrong] = weights[wrong].flatten()[:-1].clone()
        self.server.register_checkpoint(name, named_tensors=weights if self.rank == 0 else {})
        self.server.gather_metas(name)
        self.reply = None
        try:
            self.server.update(name, self.request)
            failed = None
        except RuntimeError as error:
            failed = str(error)
        self.server.unregister_checkpoint(name)
        return dict(reply=self.reply, failed=failed)

    def request(self, sockets):
        if self.rank != 0:
            return
        body = json.dumps(dict(method="update_weights_from_ipc", args=[dict(sockets)], timeout=300)).encode()
        asked = urllib.request.Request(f"{self.url}/collective_rpc", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=300) as reply:
                self.reply = [reply.status, reply.read().decode()]
        except urllib.error.HTTPError as error:
            self.reply = [error.code, error.read().decode()]


if __name__ == "__main__":
    answer(Rank())
