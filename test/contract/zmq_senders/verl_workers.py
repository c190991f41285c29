"""verl with vLLM: a worker on each GPU of the engine binds a ZeroMQ socket and sends buckets through one buffer.

The actor starts the engine's receiver meanwhile. With the shim's actor refit is the receiver.
"""

import pathlib

import pytest
import torch

from engines import DEVICES, Beside
from test_shims import actor_of, error_of, get, ray, refit_verl, rollout_config  # noqa: F401
from verl_sender import BUCKET, Sender


class Workers:
    """verl's workers, one for each rank of the engine. The first one calls the actor."""

    def __init__(self, engine, actor, device, use_shm):
        self.engine, self.actor, self.device, self.use_shm, self.replica = engine, actor, device, use_shm, 0

    def endpoint(self, rank):
        job = ray.get_runtime_context().get_job_id() if ray else "0"
        return f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{self.replica}-rank-{rank}.sock"

    def update(self, weights, step, spoil=None, size=BUCKET, **kwargs):
        future = self.actor.collective_rpc.remote(
            "update_weights_from_ipc", timeout=None, args=(), kwargs={**kwargs, "use_shm": self.use_shm}
        )
        senders = [
            Sender(
                self.endpoint(rank),
                self.device if self.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}",
                self.use_shm,
                size,
            )
            for rank in range(self.engine.ranks)
        ]
        sent = [
            Beside(
                lambda sender=sender: sender.send([(name, tensor.to(sender.device)) for name, tensor in weights], spoil)
            )
            for sender in senders
        ]
        for one in sent:
            one.result()
        get(future)
        get(self.actor.clear_kv_cache.remote())
        get(self.actor.set_global_steps.remote(step))
        return senders

    def round(self, weights, step, **kwargs):
        """Hybrid: memory is released for the training, the weights' resumed for the update and the cache's after it."""
        get(self.actor.wait_for_requests_to_drain.remote())
        get(self.actor.sleep.remote())
        assert self.engine.get("/health")["status"] == "asleep"
        get(self.actor.wake_up.remote(tags=["weights"]))
        senders = self.update(weights, step, **kwargs)
        get(self.actor.wake_up.remote(tags=["kv_cache"]))
        return senders


WAYS = [
    ("cpu", True),
    *[pytest.param(device.values[0], False, marks=device.marks) for device in DEVICES if not isinstance(device, str)],
]


@pytest.fixture(scope="module")
def workers_of(engines, actor_of):  # noqa: F811
    """An engine has one actor, as in a run of verl: each imports what it is sent, PEFT with its seconds of CPU, too."""
    actors = {}

    def make(ranks, device, use_shm, kind="qwen3-moe", flags=(), **options):
        env = {"REFIT_CUDA_SHARE_CARD": "1"} if device == "cuda" and ranks > torch.cuda.device_count() else None
        engine = engines(kind, ranks, device, *flags, env=env)
        key = engine.url, *options.items()
        if key not in actors:
            actors[key] = actor_of(
                refit_verl.RefitServer, config=rollout_config(), url=engine.url, ranks=ranks, **options
            )
            get(actors[key].launch_server.remote(master_address=None, master_port=None))
        return Workers(engine, actors[key], device, use_shm)

    return make


def shm_left():
    return set(pathlib.Path("/dev/shm").glob("verl_weights_*"))
