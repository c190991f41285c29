"""Shards of all ranks reach the engines, without a gather."""

import ctypes
import time

from .errors import EnginesFailed, RefitError
from .fan_out import each, results, submit
from .tensors import handle, pickled
from .transports import is_gone

# Plans that a client remembers; the server keeps as many.
MOST_PLANS = 8


class ShardedAdd:
    """One call of add_sharded: announces the shards, unless the engines know the plan, and moves the bytes."""

    def __init__(self, update, shards):
        self.update, self.shards = update, [shard for shard in shards if shard.local is not None]
        self.ranks, self.engines = update.ranks, update.engines.engines
        self.copied = False
        for shard in self.shards:
            if not shard.local.is_contiguous():
                shard.local, self.copied = shard.local.contiguous(), True

    def run(self):
        ways = dict(handles=self.handles, kept=self.kept, group=self.group, upload=self.upload)
        way = ways.get(self.update.transport)
        if way is None:
            raise ValueError(f"shards cannot be sent by transport {self.update.transport!r}: use {', '.join(ways)}")
        dtype = None if self.update.transport in ("handles", "kept") else self.update.dtype
        fields = dict(chunk_bytes=self.update.bucket_bytes, allow_missing=True)
        announcements = self.engines[0].announcements
        self.announced, self.key = announcements.of(self.shards, self.ranks, dtype, **fields)
        self.plans = self.update.begin_with(self.plan)
        way()
        first = self.plans[self.engines[0].url]
        self.update.tensors += first["tensors"]
        self.update.bytes += first["bytes"]["total"]
        self.update.requests += 1

    def plan(self, again=False):
        """{url: plan} of all engines. An engine that has the plan is not sent the announcement again."""

        def one(engine):
            known = None if again else engine.plans.get(self.key)
            if known is not None:
                try:
                    return engine.json("GET", f"/shard_plans/{known['id']}", admin=True)
                except Exception as error:
                    if getattr(error, "code", None) != "PLAN_STALE":
                        raise
            reply = engine.json("POST", "/shard_plans", self.announced, admin=True, retry=True)
            engine.plans.pop(self.key, None)
            engine.plans[self.key] = reply
            while len(engine.plans) > MOST_PLANS:
                engine.plans.pop(next(iter(engine.plans)))
            return reply

        return {engine.url: reply for engine, reply in each(self.engines, one).items()}

    def body(self, engine, **fields):
        plan = self.plans[engine.url]
        return dict(plan=plan["id"], digest=plan["digest"], **fields, **self.update.transaction(engine))

    def post(self, engine, **fields):
        return engine.json("POST", "/update_weights_from_shards", self.body(engine, **fields), admin=True)

    # shared memory and CUDA IPC

    def handles(self, **keep):
        """Each engine reads the shards where they lie. CPU memory moves into shared memory, once."""
        self.synchronize()
        # One pickle for each engine: torch counts each as one reader.
        every = self.ranks.every(
            lambda: [pickled([(shard.name, handle(shard.local)) for shard in self.filled()]) for _ in self.engines]
        )
        texts = {engine: [own[index] for own in every] for index, engine in enumerate(self.engines)}
        self.ranks.first(lambda: each(self.engines, lambda one: self.post(one, handles=texts[one], **keep)) and None)
        if any(shard.local.device.type == "cuda" for shard in self.shards):
            import torch

            torch.cuda.ipc_collect()

    def kept(self):
        """The engines keep the shards open; later updates only name them, as long as no shard has moved."""
        held = self.engines[0].kept.get(("shards", self.key))
        self.synchronize()
        if all(self.ranks.gather(held is not None and held["places"] == self.places())):
            if self.ranks.first(lambda: self.again(held)):
                return
        if any(self.ranks.gather(self.copied)):
            return self.handles()
        owner = self.engines[0].owner
        keep = dict(name=f"{owner} shards {self.key[:12]}"[:200], generation=time.time_ns() // 1000)
        keep = self.ranks.first(lambda: keep)
        self.engines[0].kept.pop(("shards", self.key), None)
        self.handles(keep=keep)
        # The places after the pickle: sharing moves CPU memory.
        self.engines[0].kept[("shards", self.key)] = dict(keep, places=self.places(), tensors=self.shards)

    def again(self, held):
        kept = dict(name=held["name"], generation=held["generation"])
        try:
            each(self.engines, lambda engine: self.post(engine, kept=kept))
        except Exception as error:
            errors = list(error.errors.values()) if isinstance(error, EnginesFailed) else [error]
            if all(hasattr(one, "code") and is_gone(one) for one in errors):
                return False
            raise
        return True

    def filled(self):
        return [shard for shard in self.shards if shard.local.numel() > 0]

    def places(self):
        return [(shard.name, shard.local.data_ptr(), tuple(shard.local.shape)) for shard in self.shards]

    def synchronize(self):
        """Waits for the GPU: the engines cannot wait for the work of all ranks."""
        if any(shard.local.device.type == "cuda" for shard in self.shards):
            import torch

            torch.cuda.synchronize()

    # blocks of chunks, in a process group or over HTTP

    def blocks(self, engine, turns):
        from .blocks import Blocks, Schedule

        path = f"/shard_plans/{self.plans[engine.url]['id']}/sources/{self.ranks.rank}"
        sends = engine.plans.get((self.key, "sends"))
        if sends is None or sends[0] != path:
            sends = engine.plans[self.key, "sends"] = path, engine.json("GET", path, admin=True), {}
        by_name = {shard.name: shard.local for shard in self.shards}
        locals = [by_name.get(tensor["name"]) for tensor in self.announced["tensors"]]
        group = self.update.group if self.update.transport == "group" else None
        by = "messages" if group is not None and group.backend == "nccl" else "blocks"
        kinds = [None if local is None else local.dtype for local in locals]
        schedule = sends[2].get(by)
        if schedule is None or schedule.kinds != kinds:
            dtypes = [torch_dtype(tensor["dtype"]) for tensor in self.announced["tensors"]]
            schedule = sends[2][by] = Schedule(sends[1], dtypes, kinds, by)
        return Blocks(schedule, locals, "cpu" if group is None else group.device, turns)

    def group(self):
        """Each rank sends its blocks to the ranks of the engines. One chunk travels while the next is packed."""
        group, failed = self.update.group, None
        group.join()
        replies = {}
        if self.ranks.rank == 0:
            replies = submit(self.engines, lambda engine: self.post(engine, group_name=group.name))
        try:
            with group.watch(replies):
                self.send_chunks(group)
        except Exception as error:
            # The engines see the connections end, and do not wait for the rest.
            failed = error
            group.drop()
        try:
            self.ranks.first(lambda: done(replies))
        except Exception:
            group.drop()
            raise
        if any(self.ranks.gather(failed is not None)):
            group.drop()
            raise failed or RefitError(0, "GROUP_BROKEN", "another rank failed to send its shards")

    def send_chunks(self, group):
        """A send ends when its engine has received it, or with an error when the engine has aborted the group."""
        packed, works = {}, []
        # Engines with the same plan are sent the same blocks.
        for engine in self.engines:
            packed.setdefault(self.plans[engine.url]["id"], []).append(engine)
        blocks = {plan: self.blocks(engines[0], 2) for plan, engines in packed.items()}
        group.connect()
        for chunk in range(max(self.plans[engine.url]["chunks"] for engine in self.engines)):
            if chunk >= 2:
                group.wait(works[chunk - 2])
            sends = []
            for plan, engines in packed.items():
                for rank, block in blocks[plan].take(chunk, chunk):
                    sends += [(block, engine, rank) for engine in engines]
            works.append(group.send(sends, chunk))
        for last in works[-2:]:
            group.wait(last)

    def upload(self):
        """Each rank uploads its blocks; an engine replies when it has those of all ranks."""
        replies, failed = {}, None
        if self.ranks.rank == 0:
            replies = submit(self.engines, lambda engine: self.post(engine, upload=True))

        def send(engine):
            blocks = self.blocks(engine, 1)
            for chunk in sorted(blocks.schedule.sizes):
                part = blocks.pack(chunk, 0)
                path = f"/shard_plans/{self.plans[engine.url]['id']}/parts/{self.ranks.rank}?chunk={chunk}"
                body = dict(body=lambda: [view_of(part)], length=part.numel())  # noqa: B023
                engine.json("POST", path, **body, admin=True, headers={"content-type": "application/octet-stream"})

        try:
            each(self.engines, send)
        except Exception as error:
            failed = error
        # The reply to rank 0 names the cause; the others have seen that it failed.
        self.ranks.first(lambda: done(replies))
        errors = [error for error in self.ranks.gather(failed) if error is not None]
        if errors:
            raise errors[0]


def done(replies):
    """Raises the error of an engine."""
    results(replies)


def view_of(tensor):
    """The memory of a flat tensor of bytes."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def torch_dtype(name):
    import torch

    return getattr(torch, name)
