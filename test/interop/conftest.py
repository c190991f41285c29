"""Fixtures: servers (this checkout's command line on a free loopback port) and models to serve."""

import gc
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The flags of a server of one of the tests' models.
SMALL = ["--dtype", "bfloat16", "--max-total-tokens", 512, "--skip-tokenizer-init"]
# Until freeze_imports (tensors.py).
gc.disable()
# The classes for servers and for trainers of process groups are shared with the GPU tests.
sys.path.append(str(ROOT / "test/gpu"))
import server  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=5, help="how often tests go round that can go round for long")


def pytest_collection_finish():
    from tensors import freeze_imports

    freeze_imports()


class Server(server.Server):
    made = []

    def __init__(self, model, *flags, command="serve"):
        """`model`: the argument after the command; None for none."""
        self.command = command
        super().__init__(model, *flags)
        self.made.append(self)

    def arguments(self, model):
        return [self.command, *([] if model is None else [str(model)])]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A failed test is shown with the ends of its servers' logs."""
    report = yield
    if report.failed:
        running = [one for one in Server.made if one.process.poll() is None]
        report.sections += [(f"log of {one.url}", one.tail()) for one in running]
    return report


@pytest.fixture
def serve():
    servers = []

    def start(model, *flags, **options):
        servers.append(Server(model, *flags, **options))
        return servers[-1]

    yield start
    for started in servers:
        started.stop()


@pytest.fixture(scope="module")
def serve_once(request):
    """Servers that the tests of a file share, by model, flags and letter.

    A failed test may leave anything behind, so those after it get new servers.
    """
    servers, failed = {}, {}

    def start(model, *flags, which="a"):
        key = model, flags, which
        if failed.get(key) != request.session.testsfailed:
            if key in servers:
                servers.pop(key).kill()
            servers[key], failed[key] = Server(model, *flags), request.session.testsfailed
        return servers[key]

    yield start
    for started in servers.values():
        started.stop()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Makes the tiny checkpoint of a kind (tensors.py) once per session."""
    from tensors import Model

    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = Model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """The folder for trainers' checkpoints that the servers of engine_of may load."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def engine_of(model_of, shared_folder):
    """A shared server for each kind, ranks and letter.

    Each test sends all weights, so it sees nothing of other tests.
    """
    servers = {}

    def start(kind="qwen3", ranks=1, which="a"):
        key = kind, ranks, which
        if key not in servers:
            folder = model_of(kind).folder
            servers[key] = Server(folder, *SMALL, "--tp", ranks, "--model-root", folder, "--model-root", shared_folder)
        return servers[key]

    yield start
    for started in servers.values():
        started.stop()


@pytest.fixture(scope="module")
def party(request, tmp_path_factory):
    """Trainers and servers of process groups (groups.py), shared by a file.

    Its WAITS_S: how long servers wait for a peer.
    """
    from groups import Party

    made = Party(tmp_path_factory.mktemp, getattr(request.module, "WAITS_S", 60))
    yield made
    made.close()


@pytest.fixture
def nothing_left():
    """Checks that the test leaves no shared memory file: the engine returns its references, and the sender frees its
    own.
    """
    from tensors import shared_files

    gc.collect()
    before = set(shared_files())
    yield
    gc.collect()
    assert set(shared_files()) <= before, "a file of shared memory was not freed"


@pytest.fixture
def served(engine_of, model_of):
    """A server and its model, shared by the tests of the session."""
    return lambda kind, ranks=1: (engine_of(kind, ranks), model_of(kind))
