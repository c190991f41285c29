"""An update: tensors that are added become one transaction on each engine."""

import ipaddress
import socket

from .bucket import MIB, Bucket
from .fan_out import results, submit
from .ranks import Ranks
from .tensors import checkpoint_form, full, weights_of
from .transports import TRANSPORTS


class Update:
    """Tensors for one or more engines, as one transaction on each: nothing is generated from a mixture of old and new
    weights, and the label moves at the end.

    An exception in the block aborts the transaction. `outcome` then holds, by the engine's url, the state of its
    weights ("old", "new", or "torn": it answers 503 until they are written again), or the exception why that is
    unknown. The label has not moved, and the next update may send everything again.

    version: the new label.
    transport: "handles" (shared memory or CUDA IPC; one machine), "kept" (the same memory, kept open from update to
    update), "upload" (bytes over HTTP), "group" (broadcast in a process group), "file" (safetensors in a folder that
    the engines see), or "auto": "group" if a group is given, "file" if a folder is given, "handles" for engines on this
    machine, else "upload".
    bucket_bytes: the size of one request; a larger tensor is sent alone.
    dtype: tensors are cast to it first (a torch.dtype).
    expected: "all", or the names without which the end fails.
    deadline: seconds that the transaction may take (default: the server's).
    flush_cache: drop the prefix cache. abort_all_requests: end running requests instead of waiting for them.
    in_place: "handles" and "kept" share tensors where they lie instead of copying them into a bucket. The tensors must
    live until the end; for "kept", until the next update, which sends the same ones.
    process_group: the group of all ranks of the trainer that run the block (FSDP, or one sender for each rank of the
    engine). Each adds the same tensors in the same order.
    group, folder: for "group" and "file".
    """

    def __init__(
        self, engines, version=None, transport="auto", bucket_bytes=512 * MIB, dtype=None, expected=None, deadline=None,
        flush_cache=True, abort_all_requests=False, in_place=False, process_group=None, group=None, folder=None,
    ):  # fmt: skip
        if transport != "auto" and transport not in TRANSPORTS:
            raise ValueError(f"transport: expected auto or one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if (transport == "group" and group is None) or (transport == "file" and folder is None):
            raise ValueError(f"transport {transport!r} needs {'group=' if transport == 'group' else 'folder='}")
        self.engines, self.version, self.dtype = engines, version, dtype
        self.bucket_bytes, self.in_place = int(bucket_bytes), in_place
        self.group, self.folder, self.ranks = group, folder, Ranks(process_group)
        self.fields = dict(flush_cache=flush_cache, abort_all_requests=abort_all_requests)
        self._opening = dict(expected=expected, deadline=deadline, weight_version=version)
        self.transport, self._transport, self._bucket, self._ids = transport, None, None, {}
        self.outcome, self.report = {}, None
        self.tensors = self.bytes = self.requests = 0

    def add(self, name, tensor):
        """Adds a whole tensor, of any strides, by its name in checkpoints. The caller may change it once this returns,
        unless it is shared in place."""
        tensor = full(tensor)
        if self.dtype is not None:
            tensor = tensor.to(self.dtype)
        if self._transport is None:
            self._begin()
        bytes = tensor.numel() * tensor.element_size()
        if self._bucket is not None and self._transport.full(self._bucket, bytes):
            self.flush()
        if self._bucket is None:
            self._bucket = Bucket()
        self._transport.put(self._bucket, name, tensor)

    def add_all(self, weights):
        """Adds a module, a state dict, or (name, tensor) pairs. All ranks of an FSDP model call this; each tensor is
        gathered, sent and released."""
        if hasattr(weights, "named_parameters"):
            for name, tensor in weights_of(weights):
                for own_name, own in checkpoint_form(weights, name, full(tensor)):
                    self.add(own_name, own)
        else:
            for name, tensor in weights.items() if hasattr(weights, "items") else weights:
                self.add(name, tensor)

    def add_sharded(self, weights, layout=None):
        """Adds the shards that the ranks of process_group hold, without gathering them: a module of FSDP2 or FSDP1, a
        state dict or (name, tensor) pairs with DTensors or ShardedTensors; or, with layout="megatron", a Megatron-core
        model (the list of its chunks). All ranks call this.

        The first call announces the layout, and every call moves bytes alone (docs/shards.md)."""
        from .shard_update import ShardedAdd
        from .shards import shards_of

        self.flush()
        self._choose()
        ShardedAdd(self, shards_of(weights, self.ranks, layout)).run()

    def flush(self):
        """Sends the tensors that were added. If it fails, the bucket stays, so this may be called again."""
        if self._bucket is None:
            return
        self._transport.send(self._bucket)
        self.tensors += len(self._bucket.entries)
        self.bytes += self._bucket.bytes
        self.requests += 1
        self._bucket = None

    def transaction(self, engine):
        """The fields that make a request part of this update."""
        return dict(self.fields, transaction=self._ids[engine])

    def _choose(self):
        if self.transport == "auto":
            self.transport = self.ranks.first(lambda: choose(self.engines, self.group, self.folder))

    def _begin(self):
        self._choose()
        self.ranks.first(lambda: self.engines.each(self._open) and None)
        self._transport = TRANSPORTS[self.transport](self)

    def begin_with(self, act):
        """Runs act() on rank 0 and returns its result on all ranks. The transactions open meanwhile, if none is."""
        if self._transport is not None:
            return self.ranks.first(act)

        def first():
            opened = submit(self.engines.engines, self._open)
            try:
                return act()
            finally:
                results(opened)

        result = self.ranks.first(first)
        self._transport = TRANSPORTS[self.transport](self)
        return result

    def _open(self, engine):
        body = {name: value for name, value in self._opening.items() if value is not None}
        # A repeated call under the same owner replaces the transaction whose reply was lost.
        reply = engine.json("POST", "/weight_transactions", dict(body, owner=engine.owner), admin=True, retry=True)
        self._ids[engine] = reply["id"]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                self._end()
            else:
                self._abort(error)
        except BaseException as failed:
            self._abort(failed)
            raise
        finally:
            # Releases the tensors that are shared.
            self._transport = self._bucket = None

    def _end(self):
        self.flush()
        if self._transport is None:
            self._begin()
        self._transport.end()
        self.report = self.ranks.first(self._commit_all)

    def _commit_all(self):
        return {engine.url: reply for engine, reply in self.engines.each(self._commit).items()}

    def _commit(self, engine):
        reply = engine.json("POST", f"/weight_transactions/{self._ids[engine]}/commit", {}, admin=True, retry=True)
        self.outcome[engine.url] = "new"
        return reply

    def _abort(self, why):
        """Aborts on every engine that has not committed. A failure here must not hide the reason of the abort."""
        reason = f"{type(why).__name__}: {why}"

        def abort(engine):
            try:
                path = f"/weight_transactions/{self._ids[engine]}/abort"
                reply = engine.json("POST", path, dict(reason=reason[:900]), admin=True, retry=True)
                self.outcome[engine.url] = reply["outcome"]
            except Exception as error:
                self.outcome[engine.url] = error

        left = [engine for engine in self._ids if self.outcome.get(engine.url) != "new"]
        if left and self.ranks.rank == 0:
            results(submit(left, abort))


def choose(engines, group, folder):
    """The transport that "auto" stands for."""
    if group is not None:
        return "group"
    if folder is not None:
        return "file"
    return "handles" if all(is_local(engine.host) for engine in engines.engines) else "upload"


def is_local(host):
    """Whether an address belongs to this machine: only such an address can be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        if ipaddress.ip_address(place[0].split("%")[0]).is_loopback:
            return True
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
        return True
    except OSError:
        return False
