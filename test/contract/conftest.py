"""What trainers ask of a rollout server, row by row of the drop-in matrix (rows.json; docs/trainers/README.md has the outcome).

Each test replays the requests of one trainer in one of its modes against a real server, with real torch senders where the mode
carries tensors, and asserts what that trainer relies on. Marks:

    row(12, "SkyRL / NCCL")   the row that a test is of; several where it is of several
    brings("group")           it brings weights: by "group" (gloo, on cards NCCL), "memory" (shared memory, on cards CUDA IPC), "files" or "body" (HTTP)
    refused("LoRA adapters")  it asserts that this part of the row is refused, and nothing else
    cards(2)                  it needs so many NVIDIA GPUs

A row passes when none of its tests fails and one that brings weights, if the row has any, passes: refusals alone pass no row.
`--matrix FILE` writes the outcome of every test as JSON, test by test, so that a run that is cut short has told what it knew.
"""

import datetime
import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Servers, and trainers as processes of their own, are those of the tests on cards and of the other tests against real libraries.
sys.path[:0] = [str(ROOT / "test/gpu"), str(ROOT / "test/interop")]

ROWS = {row["row"]: f"{row['trainer']} / {row['mode']}" for row in json.loads(pathlib.Path(__file__).with_name("rows.json").read_text())}
# Without cards, and on cards.
CARRIERS = {"group": ("gloo", "NCCL"), "memory": ("shared memory", "CUDA IPC"), "files": ("files", "files"), "body": ("HTTP", "HTTP")}
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
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


# Trainers and engines of one machine, over NCCL: they meet on the loopback, and both sides need the same library, torch's.
os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")


def pytest_sessionstart():
    from pynccl import library_path

    if card_count() > 0 and pathlib.Path(library_path()).exists():
        os.environ.setdefault("REFIT_NCCL", str(library_path()))


def pytest_runtest_logreport(report):
    """At once: who ends the run has seen it."""
    if report.failed:
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)


def card_count():
    return len(cards())


@pytest.fixture(scope="module")
def engines():
    """Servers of small models, by model, ranks, device and flags, that the tests of a file share."""
    from engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    """Engines of a host may read and write here."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def host(engines, shared_root, tmp_path):
    """Two engines of one host, and a folder of the test's own that they share; deltas come to `published`."""
    made = [engines("qwen3", ranks, "cpu", "--model-root", shared_root, which=letter) for ranks, letter in ((1, "a"), (2, "b"))]
    folder = shared_root / tmp_path.name
    (folder / "published").mkdir(parents=True)
    return made, folder


def rows_of(item):
    """Their numbers. A mark that names another row than it numbers is an error of the test."""
    found = sorted({marker.args for marker in item.iter_markers("row")})
    for number, mode in found:
        if ROWS.get(number) != mode:
            raise pytest.UsageError(f"{item.nodeid}: row {number} is {ROWS.get(number)!r} in rows.json, not {mode!r}")
    return [number for number, _ in found]


class Matrix:
    """What came of each test of a row."""

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
        # Of a test that goes well, its set-up and its end say nothing.
        if rows and (report.when == "call" or not report.passed):
            refused = item.get_closest_marker("refused")
            on_cards = item.get_closest_marker("cards") is not None
            ways = {CARRIERS[way][on_cards] for marker in item.iter_markers("brings") for way in marker.args}
            about = dict(rows=rows, outcome=report.outcome, brings=sorted(ways), refused=refused.args[0] if refused else None)
            known = self.tests.setdefault(f"{item.path.name}::{item.name}", about)
            known["outcome"] = max(known["outcome"], report.outcome, key=WORST_LAST.index)
        return report

    def pytest_runtest_logfinish(self):
        if self.path is not None:
            self.path.write_text(self.document())

    def document(self):
        """One line for each test."""
        import torch

        names = cards()
        about = dict(
            date=datetime.date.today().isoformat(), torch=torch.__version__,
            cards=", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) or None,
        )  # fmt: skip
        head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
        tests = ",\n".join(f"    {json.dumps(name)}: {json.dumps(known)}" for name, known in sorted(self.tests.items()))
        return f'{{\n{head}  "tests": {{\n{tests}\n  }}\n}}\n'
