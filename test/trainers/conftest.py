"""The released packages of trainers and servers (wheels.json) against real servers: their own client code runs.

`npm run test:trainers` fetches the packages; with `-- --newest` their newest releases.
"""

import gc
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Until freeze_imports (tensors.py).
gc.disable()
sys.path[:0] = [str(ROOT / folder) for folder in ("test/contract", "test/gpu", "test/interop")]
os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


def pytest_configure(config):
    config.addinivalue_line("markers", "cards(count): needs so many NVIDIA GPUs")


def pytest_collection_finish():
    from tensors import freeze_imports

    freeze_imports()


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        needed = item.get_closest_marker("cards")
        if needed is not None and torch.cuda.device_count() < needed.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} NVIDIA GPU(s)"))


@pytest.fixture(scope="module")
def engines():
    """Servers of small models by model, ranks, device and flags, shared by the tests of a file."""
    from engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture
def trainer():
    """Starts programs of this folder that run a trainer's own code."""
    from tensor_process import Process

    made = []

    def start(program):
        made.append(Process(None, str(pathlib.Path(__file__).with_name(program))))
        return made[-1]

    yield start
    for process in made:
        process.kill()
