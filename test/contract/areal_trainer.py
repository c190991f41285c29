"""AReaL's trainer: its buckets, its process groups, and its requests to each server."""

import concurrent.futures

from distributed_group import free_port
from tensors import coded

NAME = "update_weight_group"
# Bytes of a bucket: few, so a tiny model needs several.
CHUNK = 40_000


def buckets(engine):
    """Fills buckets greedily: each ends before the tensor that would exceed a chunk."""
    found, size = [[]], 0
    for name, shape in engine.shapes.items():
        bytes_ = 2 * len(coded(0, name, shape).flatten())
        if found[-1] and size + bytes_ > CHUNK:
            found.append([])
            size = 0
        found[-1].append(name)
        size += bytes_
    return found


class Trainer:
    """AReaL's FSDP engine, rank 0: its groups, with one bucket in flight while it gathers the next."""

    def __init__(self, engine, process, backend, *, names=(NAME,), mode="sglang"):
        self.engine, self.process, self.backend, self.mode, self.names = engine, process, backend, mode, names
        self.pool = concurrent.futures.ThreadPoolExecutor(4)
        process(
            "start",
            device="cuda:0" if backend == "nccl" else "cpu",
            shapes=[[name, list(shape)] for name, shape in engine.shapes.items()],
        )
        for stage, name in enumerate(names):
            self.join(name, {"pp_rank": stage} if len(names) > 1 else {})

    def join(self, name, fields):
        port = free_port()
        body = dict(
            master_address="127.0.0.1",
            master_port=str(port),
            rank_offset=1,
            world_size=2,
            backend=self.backend,
            group_name=name,
        )
        path = "/init_weights_update_group" if self.mode == "sglang" else "/areal_init_weights_update_group"
        asked = self.pool.submit(self.engine.post, path, body | fields)
        self.process(
            "join", group=name, address="127.0.0.1", port=port, rank=0, world=2, backend=self.backend, timeout_s=60
        )
        assert asked.result(180)["success"] is True

    def body(self, names, group, **announced):
        return (
            dict(
                names=names,
                dtypes=["bfloat16"] * len(names),
                shapes=[list(self.engine.shapes[name]) for name in names],
                group_name=group,
            )
            | announced
        )

    def requests(self, body):
        """The requests as its backends build them, one after another and without retries."""
        if self.mode == "sglang":
            return [self.engine.post("/update_weights_from_distributed", body | dict(abort_all_requests=True))]
        return [
            self.engine.post("/areal_set_update_weight_meta", body),
            self.engine.post("/areal_update_weights_xccl", {}),
        ]

    def pause(self):
        self.engine.post("/pause_generation" if self.mode == "sglang" else "/areal_pause_generation", {})

    def resume(self):
        self.engine.post("/continue_generation" if self.mode == "sglang" else "/areal_continue_generation", {})

    def update(self, variant, announced=None, pause=True):
        if pause:
            self.pause()
        replies = []
        for names in buckets(self.engine):
            for group in self.names:
                self.process("prepare", variant=variant, names=names)
                asked = self.pool.submit(self.requests, self.body(names, group, **(announced or {})))
                self.process("send", group=group)
                replies += asked.result(180)
        if pause:
            self.resume()
        assert all(reply["success"] is True and isinstance(reply["message"], str) for reply in replies)
