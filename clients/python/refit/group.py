"""A process group of the trainer's process and the engines' ranks."""

import contextlib
import datetime
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, wait

from .errors import RefitError
from .fan_out import results, submit


class Group:
    """A torch process group beside the trainer's own: this process is rank 0, and the ranks of the engines follow, in
    the order of the engines.

    backend: "nccl" (engines and trainer on different GPUs) or "gloo" (any engine); default: nccl if all engines use
    GPUs. address: where engines reach this process; default: this machine's address towards the first engine.
    port: 0 for a free one. timeout_s: how long each rank waits for the others.
    One update at a time may use a group. On ranks of the trainer other than 0 it does nothing.
    The first update calls join(), and calls it again after a failure; leave() destroys the group.
    """

    def __init__(self, engines, backend=None, address=None, port=0, name="weight_update_group", timeout_s=300):
        self.engines, self.backend, self.name = engines, backend, name
        self.address, self.port = address, port
        self.timeout, self._group, self._server = datetime.timedelta(seconds=timeout_s), None, None
        self._work = None

    @property
    def device(self):
        """The device that a tensor has to be on to be broadcast."""
        import torch

        if self.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def join(self):
        """All ranks join at once; does nothing if they have joined already.

        Raises RefitError if an engine refuses, and torch's own error if one does not come."""
        if self._group is not None:
            return
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        infos = self.engines.each(lambda engine: engine.server_info())
        if self.backend is None:
            self.backend = "nccl" if all(info.get("device") == "cuda" for info in infos.values()) else "gloo"
        offsets, world = {}, 1
        for engine, info in infos.items():
            offsets[engine] = world
            world += info["tp_size"] * info.get("pp_size", 1)
        first = self.engines.engines[0]
        self.address = self.address or address_towards(first.host, first.port)
        # The server waits for no rank, so a refusal is known at once.
        server = dist.TCPStore(self.address, self.port, world, True, self.timeout, wait_for_workers=False)
        place = dict(master_address=self.address, master_port=server.port, world_size=world)
        place.update(group_name=self.name, backend=self.backend)

        def init(engine):
            body = dict(place, rank_offset=offsets[engine])
            return engine.json("POST", "/init_weights_update_group", body, admin=True)

        joining = submit(self.engines.engines, init)
        if any(future.exception() is not None for future in wait(joining.values(), return_when=FIRST_EXCEPTION).done):
            self._abandon(joining)
        results(joining)
        # This counts our rank. An engine that was counted last would give the others time to connect before it replies,
        # and they would wait for its reply.
        store = dist.TCPStore(self.address, server.port, world, False, self.timeout)
        # torch makes a group beside the default one only by private functions. Their parameter for options has had
        # several names, so it is not passed.
        made = c10d._new_process_group_helper(
            world,
            0,
            [],
            dist.Backend(self.backend),
            dist.PrefixStore(self.name, store),
            group_name=self.name,
            timeout=self.timeout,
        )
        self._group, self._server = made[0] if isinstance(made, tuple) else made, server
        # Callers name ranks of this group itself: the engines have no rank in the trainer's default group.
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    def _abandon(self, joining):
        """Makes engines leave a group that another engine refused to join.

        First the engines that still wait for ranks which will not come, then those that have been counted, or are now.
        An engine that refused may have a group of this name that belongs to somebody else: it is left alone."""
        for concerned in (lambda future: not future.done(), lambda future: future.exception() is None):
            engines = [engine for engine, future in joining.items() if concerned(future)]
            if engines:
                with contextlib.suppress(RefitError):
                    self.destroy_remote(engines)
            wait(joining.values())

    def destroy_remote(self, engines=None):
        body = dict(group_name=self.name)
        results(
            submit(
                engines or self.engines.engines,
                lambda engine: engine.json("POST", "/destroy_weights_update_group", body, admin=True),
            )
        )

    def broadcast(self, tensor, replies):
        """replies: {engine: future of its reply to the announcement}. Returns when all have replied."""
        import torch.distributed as dist

        try:
            self._work = work = dist.broadcast(tensor, 0, group=self._group, async_op=True)
            patience = None
            while not work.is_completed():
                failed = [future.exception() for future in replies.values() if future.done()]
                # An engine that fails before it has received will not join the broadcast, and one that was not reached
                # does not know of it.
                if any(failed):
                    unreached = all(getattr(error, "code", None) == "UNREACHABLE" for error in failed)
                    patience = patience or time.monotonic() + (0 if unreached else 10)
                if patience is not None and time.monotonic() > patience:
                    raise RefitError(0, "GROUP_BROKEN", "an engine left the broadcast")
                time.sleep(0.0005)
            work.wait()
            self._work = None
        except Exception as error:
            self.drop()
            results(replies)
            raise error if isinstance(error, RefitError) else RefitError(0, "GROUP_BROKEN", str(error)) from error
        results(replies)

    def drop(self):
        """Drops a broken group without a handshake. The next join makes a new one."""
        import torch.distributed as dist

        group, self._group, self._server = self._group, None, None
        work, self._work = self._work, None
        with contextlib.suppress(Exception):
            if self.backend == "nccl":
                group.abort()
            dist.destroy_process_group(group)
        if self.backend == "gloo" and work is not None:
            outlive(group, work)
        with contextlib.suppress(RefitError):
            self.destroy_remote()

    def leave(self):
        """Ends the group on all ranks."""
        import torch.distributed as dist

        if self._group is None:
            return
        group, self._group = self._group, None
        try:
            self.destroy_remote()
        finally:
            dist.destroy_process_group(group)
            self._server = None

    def __enter__(self):
        self.join()
        return self

    def __exit__(self, *_):
        self.leave()


def outlive(group, work):
    """Keeps a broken gloo group until its broadcast has failed, in a thread of its own.

    torch cannot abort it. The group's destructor waits for it up to the group's timeout, with the interpreter locked,
    and the garbage collector may run it anywhere in the trainer."""
    held = [group]

    def hold():
        with contextlib.suppress(Exception):
            work.wait()
        held.clear()

    threading.Thread(target=hold, daemon=True).start()


def address_towards(host, port):
    """This machine's address towards a host; no packet is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]
