"""Sends the model's weights to refit by any transport of its client, and carries a run over the end of the server."""

import contextlib
import re
import shutil
import time
from pathlib import Path

import torch.distributed as dist
from refit import Clients, RefitError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# No reply, or one that says "later": the server has ended, starts, or has torn weights.
LOST = (0, 502, 503, 504)


class Plain:
    """A transport of the client that needs nothing besides its name."""

    live = False  # updates never wait for requests

    def __init__(self, client, name, folder):
        self.client, self.options = client, {"transport": name}

    def update(self, version):
        return self.client.update(version=version, **self.options)

    def add(self, update, model):
        update.add_all(model)

    def sent(self, label):
        """The server has all weights under this label."""

    def lost(self):
        """The server may have ended."""

    def close(self):
        """The run is over."""


class Kept(Plain):
    """The model's own memory stays open in the server; from the second update on, a request is a few bytes."""

    def __init__(self, client, name, folder):
        super().__init__(client, "kept", folder)
        self.options["in_place"] = True

    def close(self):
        with contextlib.suppress(RefitError):
            self.client.release_kept()


class Live(Kept):
    """The same while answers are generated: they go on with the new weights, and no update waits for their end."""

    live = True


class Shards(Plain):
    """The parameters as DTensors of a mesh, read by the engines where they lie. The mesh has one rank here, so the
    trainer is the same as with every transport; a trainer in FSDP2 calls add_sharded(model) on all its ranks.

    A plan of shards belongs to one engine, so the engines behind a gateway are updated themselves."""

    def __init__(self, client, name, folder):
        self.front, self.mesh = client, None
        self.own = not dist.is_initialized()
        if self.own:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.client, self.options = None, {"transport": "handles", "process_group": dist.group.WORLD}

    def update(self, version):
        if self.client is None:
            self.client = engines_of(self.front)
        return super().update(version)

    def add(self, update, model):
        if self.mesh is None:
            self.mesh = DeviceMesh(model.device.type, [0])
        weights = model.named_parameters()
        update.add_sharded([(name, DTensor.from_local(one.detach(), self.mesh, [Shard(0)])) for name, one in weights])

    def lost(self):
        self.client = None  # a server that is started again may have other engines

    def close(self):
        if self.own:
            dist.destroy_process_group()


def engines_of(client):
    """The client, or a client of the engines if it is one of a gateway."""
    try:
        workers = client.json("GET", "/workers")["workers"]
    except RefitError as error:
        if error.status != 404:
            raise
        return client
    return Clients([client.at(worker["url"]) for worker in workers])


class Group(Plain):
    """A broadcast; the group is made again after a failure."""

    def __init__(self, client, name, folder):
        super().__init__(client, name, folder)
        self.group = client.group(timeout_s=60)
        self.options = {"group": self.group}

    def lost(self):
        self.group.drop()

    def close(self):
        with contextlib.suppress(RefitError):
            self.group.leave()


class File(Plain):
    """Files in a folder that the server reads; those of the step before are removed."""

    def __init__(self, client, name, folder):
        if folder is None:
            raise SystemExit("--transport file needs --folder, a folder inside the server's --model-root")
        super().__init__(client, name, folder)
        self.folder, self.label, self.options = Path(folder), None, {"folder": folder}

    def sent(self, label):
        if self.label not in (None, label):
            shutil.rmtree(self.folder / re.sub(r"[^\w.-]", "_", self.label), ignore_errors=True)
        self.label = label


# One more transport of the client is one more line.
TRANSPORTS = {
    "handles": Plain,
    "kept": Kept,
    "upload": Plain,
    "group": Group,
    "file": File,
    "shards": Shards,
    "live": Live,
}


class Sender:
    """note: gets a text when something unusual happened."""

    def __init__(self, client, model, transport, folder=None, patience=600, note=print):
        self.client, self.model, self.patience, self.note = client, model, patience, note
        self.transport = TRANSPORTS[transport](client, transport, folder)
        self.label, self.running, self.reports = None, False, []

    def send(self, label, running=False):
        """Replaces the weights, however often the server ends meanwhile. running: requests go on with the new ones."""
        self.label, self.running = label, running or self.transport.live
        self.insist(self.once)

    def once(self):
        pause = self.client.paused("in_place") if self.running else contextlib.nullcontext()
        with pause, self.transport.update(self.label) as update:
            self.transport.add(update, self.model)
        self.transport.sent(self.label)
        self.reports.append(update.report)

    def insist(self, call):
        """call() until it succeeds. After a failure the server gets the weights again before the next try, because it
        may have been started again with those of its folder. A third refusal is raised: it would be repeated for
        ever."""
        refusals, deadline = 0, None
        while True:
            try:
                if deadline is not None:
                    self.transport.lost()
                    if self.label is not None:
                        self.once()
                    self.note("the server is there, with the weights of this step")
                return call()
            except RefitError as error:
                if deadline is None:
                    deadline = time.monotonic() + self.patience
                    self.note(f"the server fails, waiting for it: {error}")
                refusals += error.status not in LOST
                if refusals == 3 or time.monotonic() > deadline:
                    raise
                time.sleep(0.25)

    def close(self):
        self.transport.close()
