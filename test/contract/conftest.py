"""The requests of trainers, row by row of the drop-in matrix (rows.json; docs/trainers/README.md has the outcome).

Each test replays the requests of one trainer in one of its modes against a real server, with real torch senders if the
mode carries tensors. It asserts what that trainer relies on. Marks:

    row(12, "SkyRL / NCCL")   the row that a test belongs to; several marks for several rows
    brings("group")           it sends weights: by "group" (gloo, on GPUs NCCL), "memory" (shared memory, on GPUs CUDA
                              IPC), "files" or "body" (HTTP)
    refused("LoRA adapters")  it only asserts that this part of the row is refused
    cards(2)                  it needs so many NVIDIA GPUs

A row passes if none of its tests fails and, if it has tests that send weights, at least one of them passes. Refusals
alone do not pass a row. `--matrix FILE` writes the outcomes as JSON after every test, so an interrupted run keeps its
results.
"""

import datetime
import gc
import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Until freeze_imports (tensors.py).
gc.disable()
# The servers and the trainers' processes are shared with the GPU tests and with test/interop.
sys.path[:0] = [str(ROOT / folder) for folder in ("test/gpu", "test/interop", "test/contract/zmq_senders")]

ROWS = {
    row["row"]: f"{row['trainer']} / {row['mode']}"
    for row in json.loads(pathlib.Path(__file__).with_name("rows.json").read_text())
}
# (without GPUs, on GPUs)
CARRIERS = {
    "group": ("gloo", "NCCL"),
    "memory": ("shared memory", "CUDA IPC"),
    "files": ("files", "files"),
    "body": ("HTTP", "HTTP"),
}
WORST_LAST = ["passed", "skipped", "failed"]


def pytest_addoption(parser):
    parser.addoption("--matrix", type=pathlib.Path, help="where the outcome of every test is written")


def pytest_configure(config):
    config.addinivalue_line("markers", "row(number, mode): the row of the drop-in matrix that a test is of")
    config.addinivalue_line("markers", "brings(way): it brings weights, by group, memory, files or body")
    config.addinivalue_line("markers", "refused(what): it asserts that this part of the row is refused")
    config.addinivalue_line("markers", "cards(count): needs so many NVIDIA GPUs")
    config.pluginmanager.register(Matrix(config.getoption("--matrix")))


def cards():
    # Importing torch takes seconds of CPU, and the process that only starts pytest's workers needs it for nothing else.
    if not os.path.exists("/dev/nvidiactl"):
        return []
    import torch

    return (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )


# Over NCCL, trainers and engines of one machine meet on the loopback, and both sides need the same library, torch's.
os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")


def pytest_collection_finish():
    from tensors import freeze_imports

    freeze_imports()


def pytest_sessionstart():
    if card_count() == 0:
        return
    from pynccl import library_path

    if pathlib.Path(library_path()).exists():
        os.environ.setdefault("REFIT_NCCL", str(library_path()))


def pytest_runtest_logreport(report):
    """Prints a failure at once, so an interrupted run has shown it."""
    if report.failed:
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)


def card_count():
    return len(cards())


@pytest.fixture(scope="module")
def engines():
    """Servers of small models by model, ranks, device and flags, shared by the tests of a file."""
    from engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    """The folder that the engines of a host may read and write."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def host(engines, shared_root, tmp_path):
    """Two engines of one host, and a folder of this test that both share. Deltas are written to `published`."""
    made = [
        engines("qwen3", ranks, "cpu", "--model-root", shared_root, which=letter)
        for ranks, letter in ((1, "a"), (2, "b"))
    ]
    folder = shared_root / tmp_path.name
    (folder / "published").mkdir(parents=True)
    return made, folder


@pytest.fixture(scope="session")
def ray_of_session():
    """Ray on this machine, if it is installed. Its own processes take seconds of CPU to start, so files share them."""
    from shim_actors import CLIENTS, ray

    if ray:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        # Ray starts its workers with the variables of its own start. With a `runtime_env` it would start each twice.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([CLIENTS, os.environ.get("PYTHONPATH", "")]))
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if ray:
        ray.shutdown()


def rows_of(item):
    """The numbers of a test's rows. A mark whose number and name disagree is an error."""
    found = sorted({marker.args for marker in item.iter_markers("row")})
    for number, mode in found:
        if ROWS.get(number) != mode:
            raise pytest.UsageError(f"{item.nodeid}: row {number} is {ROWS.get(number)!r} in rows.json, not {mode!r}")
    return [number for number, _ in found]


class Matrix:
    """Collects the outcome of each test of a row."""

    def __init__(self, path):
        self.path, self.tests = path, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            needed = item.get_closest_marker("cards")
            if needed is not None and card_count() < needed.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} NVIDIA GPU(s)"))
            rows_of(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        rows = rows_of(item)
        # The set-up and the tear-down count only if they fail.
        if rows and (report.when == "call" or not report.passed):
            refused = item.get_closest_marker("refused")
            on_cards = item.get_closest_marker("cards") is not None
            ways = {CARRIERS[way][on_cards] for marker in item.iter_markers("brings") for way in marker.args}
            about = dict(
                rows=rows, outcome=report.outcome, brings=sorted(ways), refused=refused.args[0] if refused else None
            )
            known = self.tests.setdefault(f"{item.path.name}::{item.name}", about)
            known["outcome"] = max(known["outcome"], report.outcome, key=WORST_LAST.index)
        return report

    def pytest_runtest_logfinish(self):
        if self.path is not None:
            self.path.write_text(self.document())

    def document(self):
        """The JSON document, with one line for each test."""
        import torch

        names = cards()
        about = dict(
            date=datetime.date.today().isoformat(),
            torch=torch.__version__,
            cards=", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) or None,
        )
        head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
        tests = ",\n".join(f"    {json.dumps(name)}: {json.dumps(known)}" for name, known in sorted(self.tests.items()))
        return f'{{\n{head}  "tests": {{\n{tests}\n  }}\n}}\n'
