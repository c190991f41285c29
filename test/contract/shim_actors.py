"""Shared by the tests of the Ray shims: actors with and without Ray, engines, and models."""

import asyncio
import sys
import threading
import types
import warnings

import pytest
from conftest import ROOT
from server import Server
from tensors import Model

try:
    import ray
except ImportError:
    ray = None
    warnings.warn(
        "THERE IS NO ray: the shims are called as plain classes, no actor was made (pip install ray)", stacklevel=1
    )


CLIENTS = str(ROOT / "clients/python")
sys.path[:0] = [CLIENTS, str(ROOT / "examples/trainers")]

FLAGS = ["--dtype", "bfloat16", "--max-total-tokens", 4096, "--max-running-requests", 8]
GREEDY = types.SimpleNamespace(
    temperature=0.0, top_p=1.0, top_k=-1, max_tokens=4, min_tokens=1, skip_special_tokens=False, logprobs=1
)


class Plain:
    """An actor's handle without Ray: `actor.method.remote(...)`, awaited on one event loop as in Ray."""

    class Method:
        def __init__(self, actor, name):
            self.actor, self.name = actor, name

        def remote(self, *args, **options):
            async def run():
                result = getattr(self.actor.made, self.name)(*args, **options)
                return await result if asyncio.iscoroutine(result) else result

            return asyncio.run_coroutine_threadsafe(run(), self.actor.loop)

    def __init__(self, kind, **options):
        self.made, self.loop = kind(**options), asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __getattr__(self, name):
        return Plain.Method(self, name)


def get(asked, timeout=300):
    if isinstance(asked, list):
        return [get(one) for one in asked]
    return ray.get(asked, timeout=timeout) if ray else asked.result(timeout)


def actor(kind, name=None, **options):
    return ray.remote(kind).options(num_cpus=0, name=name).remote(**options) if ray else Plain(kind, **options)


@pytest.fixture(scope="module")
def actor_of(ray_of_session):
    return actor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def engine(model):
    with Server(model.folder, *FLAGS, "--skip-tokenizer-init") as server:
        yield server


@pytest.fixture(scope="module")
def adder():
    with Server(ROOT / "models/adder", *FLAGS, "--model-root", ROOT / "models") as server:
        yield server


def error_of(asked):
    with pytest.raises(Exception) as failed:
        get(asked)
    return str(failed.value)
