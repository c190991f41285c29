"""What trainers ask of a rollout server, row by row of the drop-in matrix (docs/trainers/README.md).

Each test replays the requests of one trainer in one of its modes against a real server, with real torch senders where the mode
carries tensors, and asserts what that trainer relies on. `@pytest.mark.row(12, "SkyRL / NCCL")` says which row a test is of; a row
passes when all its tests do. `@pytest.mark.cards(2)` needs so many NVIDIA GPUs. `--matrix FILE` writes the outcome of every row as JSON.
"""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Servers, and trainers as processes of their own, are those of the tests on cards and of the other tests against real libraries.
sys.path[:0] = [str(ROOT / "test/gpu"), str(ROOT / "test/interop")]

ROWS = {}


def pytest_addoption(parser):
    parser.addoption("--matrix", type=pathlib.Path, help="where the outcome of every row is written")


def pytest_configure(config):
    config.addinivalue_line("markers", "row(number, mode): the row of the drop-in matrix that a test is of")
    config.addinivalue_line("markers", "cards(count): needs so many NVIDIA GPUs")


def card_count():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items):
    for item in items:
        needed = item.get_closest_marker("cards")
        if needed is not None and card_count() < needed.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} NVIDIA GPU(s)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    for marker in item.iter_markers("row"):
        number, mode = marker.args
        row = ROWS.setdefault(number, dict(mode=mode, passed=[], failed=[], skipped=[]))
        if report.failed or (report.when == "call" and report.passed) or report.skipped:
            row[report.outcome].append(item.name)
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--matrix")
    if path is not None:
        path.write_text(json.dumps(dict(sorted(ROWS.items())), indent=2) + "\n")
