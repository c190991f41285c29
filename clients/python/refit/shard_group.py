"""A process group of all ranks of the trainer and all ranks of the engines."""

import contextlib
import datetime

from .group import address_towards
from .ranks import Ranks


class ShardGroup:
    """Shards travel in it from rank to rank. The ranks of process_group come first, then those of the engines.

    All ranks of the trainer make it, and call its methods together. address: where engines and other ranks reach the
    process of rank 0; default: its address towards the first engine. timeout_s: how long each rank waits for others.
    The first update calls join(), and calls it again after a failure; leave() destroys the group."""

    all_ranks = True
    backend = "gloo"

    def __init__(self, engines, process_group=None, address=None, port=0, name="shard_update_group", timeout_s=300):
        self.engines, self.ranks, self.name = engines, Ranks(process_group), name
        self.address, self.port = address, port
        self.timeout, self.group, self._server, self.offsets = datetime.timedelta(seconds=timeout_s), None, None, {}

    @property
    def device(self):
        import torch

        return torch.device("cpu")

    def join(self):
        """Does nothing if the group has been joined. Raises RefitError if an engine refuses."""
        if self.group is not None:
            return
        import torch.distributed as dist

        def host():
            infos = self.engines.each(lambda engine: engine.server_info())
            sizes = {engine.url: info["tp_size"] * info.get("pp_size", 1) for engine, info in infos.items()}
            first = self.engines.engines[0]
            address = self.address or address_towards(first.host, first.port)
            world = self.ranks.size + sum(sizes.values())
            self._server = dist.TCPStore(address, self.port, world, True, self.timeout, wait_for_workers=False)
            return address, self._server.port, sizes

        address, port, sizes = self.ranks.first(host)
        next_rank = self.ranks.size
        for url, count in sizes.items():
            self.offsets[url] = next_rank
            next_rank += count
        world = next_rank
        place = dict(master_address=address, master_port=port, world_size=world)
        place.update(group_name=self.name, backend=self.backend)

        def init(engine):
            body = dict(place, rank_offset=self.offsets[engine.url])
            return engine.json("POST", "/init_weights_update_group", body, admin=True)

        # Making the client counts this rank.
        store = dist.TCPStore(address, port, world, False, self.timeout)
        # An engine replies once its ranks have been counted; the connections follow.
        self.ranks.first(lambda: self.engines.each(init) and None)
        # The keys are those of a group that torch's own function makes under this name.
        keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, store)))
        self.group = dist.ProcessGroupGloo(keys, self.ranks.rank, world, self.timeout)
        self._store = store

    def send(self, tensor, engine, rank, tag):
        """Begins to send to one rank of an engine; returns torch's work."""
        return self.group.send([tensor], self.offsets[engine.url] + rank, tag)

    def drop(self):
        """Drops a broken group. The next join makes a new one."""
        self.group = None
        if self.ranks.rank == 0:
            with contextlib.suppress(Exception):
                self.destroy_remote()
        self._server = self._store = None

    def destroy_remote(self):
        body = dict(group_name=self.name)
        self.engines.each(lambda engine: engine.json("POST", "/destroy_weights_update_group", body, admin=True))

    def leave(self):
        """Ends the group on all ranks."""
        if self.group is None:
            return
        try:
            self.ranks.first(lambda: self.destroy_remote())
        finally:
            self.group = self._server = self._store = None

    def __enter__(self):
        self.join()
        return self

    def __exit__(self, *_):
        self.leave()
