"""A process group of all ranks of the trainer and all ranks of the engines."""

import contextlib
import datetime
import threading
import time

from .errors import RefitError
from .fan_out import results
from .group import address_towards
from .ranks import Ranks


class ShardGroup:
    """Shards travel in it from rank to rank. The ranks of process_group come first, then those of the engines.

    All ranks of the trainer make it, and call its methods together. address: where engines and other ranks reach the
    process of rank 0; default: its address towards the first engine. timeout_s: how long each rank waits for others.
    The first update calls join(), and calls it again after a failure; leave() destroys the group.

    backend: "nccl" (no rank of the trainer on a GPU of an engine; a rank's GPU is its current device) or "gloo" (any
    engine); default: nccl if the trainer and all engines use GPUs."""

    all_ranks = True

    def __init__(
        self, engines, process_group=None, backend=None, address=None, port=0, name="shard_update_group", timeout_s=300
    ):  # fmt: skip
        self.engines, self.ranks, self.backend, self.name = engines, Ranks(process_group), backend, name
        self.address, self.port = address, port
        self.timeout, self.group, self._server, self.offsets = datetime.timedelta(seconds=timeout_s), None, None, {}
        self._connected, self._turn, self._replies, self._asked = False, 0, {}, 0.0

    @property
    def device(self):
        import torch

        if self.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def join(self):
        """Does nothing if the group has been joined. Raises RefitError if an engine refuses."""
        if self.group is not None:
            return
        import torch
        import torch.distributed as dist

        def host():
            infos = self.engines.each(lambda engine: engine.server_info())
            if self.backend is None:
                on_gpus = torch.cuda.is_available() and all(info.get("device") == "cuda" for info in infos.values())
                self.backend = "nccl" if on_gpus else "gloo"
            sizes = {engine.url: info["tp_size"] * info.get("pp_size", 1) for engine, info in infos.items()}
            first = self.engines.engines[0]
            address = self.address or address_towards(first.host, first.port)
            world = self.ranks.size + sum(sizes.values())
            self._server = dist.TCPStore(address, self.port, world, True, self.timeout, wait_for_workers=False)
            return address, self._server.port, sizes, self.backend

        address, port, sizes, self.backend = self.ranks.first(host)
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

        # An engine replies once its ranks have been counted; the connections follow.
        self.ranks.first(lambda: self.engines.each(init) and None)
        # This counts our rank, last, as in Group.join.
        store = dist.TCPStore(address, port, world, False, self.timeout)
        # The keys are those of a group that torch's own function makes under this name.
        keys = dist.PrefixStore(self.name, store)
        keys = dist.PrefixStore(f"{self.device.type}/", dist.PrefixStore(f"{self.name}/", keys))
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self.group = dist.ProcessGroupNCCL(keys, self.ranks.rank, world, options)
        else:
            self.group = dist.ProcessGroupGloo(keys, self.ranks.rank, world, self.timeout)
        # A connection of its own, where torch can: the group waits in the other one for the id of rank 0.
        self._store, self._connected = store.clone() if hasattr(store, "clone") else store, False

    @contextlib.contextmanager
    def watch(self, replies):
        """Around the sends of an update: its waits end when a reply of an engine, which rank 0 has, is an error.

        NCCL does not notice that an engine has given up; its sends would wait for ever."""
        self._turn += 1
        self._replies = replies
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):
                self._store.set(self._mark, "failed")
            raise
        finally:
            self._replies = {}

    @property
    def _mark(self):
        return f"refit/{self.name}/failed/{self._turn}"

    def check(self):
        """Raises if the update has failed on an engine or another rank."""
        results({engine: reply for engine, reply in self._replies.items() if reply.done()})
        now = time.monotonic()
        if now - self._asked > 0.02:
            self._asked = now
            if self._store.check([self._mark]):
                raise RefitError(0, "GROUP_BROKEN", "another rank or an engine failed while shards were sent")

    def connect(self):
        """Makes NCCL's communicator with the other ranks. Engines make theirs at their first update."""
        if self._connected or self.backend != "nccl":
            return
        import torch

        device, failed = self.device, []

        def make():
            try:
                torch.cuda.set_device(device)
                self.group.eager_connect_single_device(device)
            except Exception as error:
                failed.append(error)

        # It cannot be interrupted, so a thread waits in it.
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            self.check()
        if failed:
            raise failed[0]
        self._connected = True

    def send(self, sends, chunk):
        """Begins to send a chunk: [(flat tensor, engine, its rank)]. Returns torch's works."""
        ranks = [self.offsets[engine.url] + rank for _, engine, rank in sends]
        if self.backend == "gloo":
            return [self.group.send([tensor], rank, chunk) for (tensor, *_), rank in zip(sends, ranks)]
        if not sends:
            return []
        # As torch's batch_isend_irecv: one group of NCCL, in the communicator of all ranks.
        self.group._start_coalescing()
        for (tensor, *_), rank in zip(sends, ranks):
            self.group.send([tensor], rank, 0)
        return [self.group._end_coalescing()]

    def wait(self, works):
        """Returns when a chunk has been received."""
        for work in works:
            while self.backend == "nccl" and not work.is_completed():
                self.check()
                time.sleep(0.0001)
            work.wait()

    def drop(self):
        """Drops a broken group. The next join makes a new one."""
        self._abort()
        if self.ranks.rank == 0:
            with contextlib.suppress(Exception):
                self.destroy_remote()
        self._server = self._store = None

    def _abort(self):
        group, self.group = self.group, None
        if self.backend == "nccl" and self._connected:
            with contextlib.suppress(Exception):
                group.abort()
        self._connected = False

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
            self._abort()
            self._server = self._store = None

    def __enter__(self):
        self.join()
        return self

    def __exit__(self, *_):
        self.leave()
