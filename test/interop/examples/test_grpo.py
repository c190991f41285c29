"""examples/grpo: the policy learns through refit, by every transport, and over the end of the server."""

import csv
import gc
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from conftest import ROOT
from server import node, settled
from tensors import remove_shared_files

sys.path[:0] = [str(ROOT / "examples/grpo"), str(ROOT / "examples/adder"), str(ROOT / "clients/python")]
import grpo  # noqa: E402
import on_gpu  # noqa: E402
import refit  # noqa: E402
import sender  # noqa: E402

MODEL = ROOT / "models/adder-base"
# float32 on both sides leaves only the order of sums; bfloat16 rounds weights and activations of the engine.
FLAGS = ["--dtype", "float32", "--threads", 1, "--max-total-tokens", 16384]


@pytest.fixture(autouse=True)
def default_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


HELD_OUT = grpo.sums.held_out


@pytest.fixture(autouse=True)
def few_sums(monkeypatch):
    """Runs measure their accuracy on a few sums: the usual 1,500 answers take longer than their steps."""
    monkeypatch.setattr(grpo.sums, "held_out", lambda: [pairs[:20] for pairs in HELD_OUT()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder for checkpoints that the servers of `rollout` may load."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def rollout(serve_once, folder):
    """A shared server that has the weights and the label of a new one again."""

    def start(*flags, which="a"):
        server = serve_once(MODEL, *FLAGS, "--model-root", MODEL, "--model-root", folder, *flags, which=which)
        server.post("/update_weights_from_disk", dict(model_path=str(MODEL), weight_version="default"))
        return server

    return start


@pytest.fixture
def killed_receivers():
    yield
    gc.collect()
    remove_shared_files()


def arguments(server, *more, steps=3):
    """Small steps. Later options win."""
    options = ["--url", server.url, "--steps", steps, "--patience", 120, "--prompts", 32, "--samples", 4]
    return grpo.arguments("", list(map(str, [*options, *more])))


def rows_of(folder):
    with open(folder / "steps.csv") as file:
        return [{name: float(value) for name, value in row.items() if value != ""} for row in csv.DictReader(file)]


def test_the_policy_learns_and_its_logprobs_are_the_engines(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.sums, "held_out", HELD_OUT)
    server = serve(MODEL, *FLAGS)
    whole = ["--prompts", 96, "--samples", 4]
    before, after = grpo.train(arguments(server, "--out", tmp_path, "--measure", 20, *whole, steps=20))
    assert after > before + 0.08
    rows = rows_of(tmp_path)
    assert len(rows) == 20 and all(row["staleness"] == 0 for row in rows)
    assert max(row["mismatch_max"] for row in rows) < 1e-3
    assert (tmp_path / "steps.svg").read_text().count("<polyline") == 8
    # The server has measured the same.
    truth = server.get("/truth")
    assert len(truth["versions"]) == 16 and truth["versions"][-1]["version"] == "step-19"
    assert 0 < truth["mean"] < 1e-4 and truth["max"] < 1e-3 and truth["clipped"] == 0
    assert truth["tokens"] == server.metric("refit:truth_tokens_total")


def test_in_bfloat16_the_mismatch_stays_under_its_bound(serve, tmp_path):
    server = serve(MODEL, "--threads", 1)
    grpo.train(arguments(server, "--out", tmp_path, steps=5))
    rows = rows_of(tmp_path)
    assert all(0 < row["mismatch"] < 0.05 and row["mismatch_max"] < 1 for row in rows)
    assert server.get("/truth")["kl"] < 0.01


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("transport", [name for name, one in sender.TRANSPORTS.items() if not one.live])
def test_every_transport_sends_the_trainers_weights(rollout, folder, tmp_path, transport):
    server = rollout()
    grpo.train(arguments(server, "--transport", transport, "--folder", folder, "--out", tmp_path))
    rows = rows_of(tmp_path)
    assert len(rows) == 3 and max(row["mismatch_max"] for row in rows) < 1e-3
    assert server.get("/weight_version")["weight_version"] == "step-3"
    assert server.metric("refit:kept_tensor_names") == 0 and server.metric("refit:weight_groups") == 0


@pytest.mark.parametrize("transport", ["kept", "group", "live"])
def test_an_asynchronous_run_is_one_step_stale(rollout, tmp_path, transport):
    server = rollout()
    more = [] if transport == "live" else ["--asynchronous"]
    grpo.train(arguments(server, "--transport", transport, "--out", tmp_path, *more, steps=6))
    rows = rows_of(tmp_path)
    assert rows[0]["staleness"] == 0
    assert all(0 <= row["staleness"] <= 1 for row in rows[1:]) and max(row["staleness"] for row in rows) > 0
    # One step of learning lies between the two policies.
    assert max(row["mismatch"] for row in rows) < 0.2
    assert server.get("/weight_version")["weight_version"] == "step-6"
    assert server.metric("refit:kept_tensor_names") == 0 and server.metric("refit:weight_groups") == 0


@pytest.mark.parametrize("transport", ["handles", "group", "shards"])
def test_two_engines_behind_one_port_get_the_same_weights(rollout, tmp_path, transport):
    server = rollout("--dp", 2)
    before = server.get("/truth")["tokens"]
    grpo.train(arguments(server, "--transport", transport, "--out", tmp_path))
    assert max(row["mismatch_max"] for row in rows_of(tmp_path)) < 1e-3
    assert server.get("/truth")["tokens"] > before and server.get("/truth")["max"] < 1e-3
    assert len({str(sorted(one["checksums"].items())) for one in
                server.post("/weights_checker", dict(action="checksum"))["engines"].values()}) == 1


def kill(server):
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def start(server):
    """Starts a killed server again at the same port."""
    server.process = subprocess.Popen(server.process.args, stdout=server.log, stderr=subprocess.STDOUT)


def restart(server):
    kill(server)
    start(server)


def weights_step(server):
    name = server.get("/weight_version")["weight_version"]
    return int(name.removeprefix("step-")) if name.startswith("step-") else -1


def restart_after(server, step):
    """Restarts it once it has the weights of a step. The thread that does so."""

    def run():
        settled(lambda: weights_step(server), lambda reached: reached >= step)
        restart(server)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.usefixtures("killed_receivers")
@pytest.mark.parametrize(
    "transport, asynchronous", [*((name, False) for name in sender.TRANSPORTS), ("kept", True), ("group", True)]
)
def test_a_run_goes_on_when_its_server_is_killed(rollout, folder, tmp_path, capsys, transport, asynchronous):
    server = rollout()
    restarting = restart_after(server, 2)
    more = ["--asynchronous"] if asynchronous else []
    options = ["--transport", transport, "--folder", folder, "--out", tmp_path, *more]
    grpo.train(arguments(server, *options, steps=6))
    restarting.join()
    assert re.search("the server fails, waiting for it", capsys.readouterr().out)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    if not asynchronous and transport != "live":
        assert max(row["mismatch_max"] for row in rows) < 1e-3, "no sample came from the base model of the new server"
    assert refit.Client(server.url).version() == "step-6"


@pytest.mark.usefixtures("killed_receivers")
@pytest.mark.parametrize(
    "transport, inside",
    [*((name, "update") for name in sender.TRANSPORTS), ("kept", "before update"), ("kept", "rollout")],
)
def test_a_run_goes_on_when_its_gateway_is_killed(
    serve, rollout, folder, tmp_path, capsys, monkeypatch, transport, inside
):
    engines = [rollout(which=letter) for letter in "ab"]
    gateway = serve(None, *[flag for one in engines for flag in ("--engine", one.url)], command="gateway")
    kind = sender.TRANSPORTS[transport]
    owner, name = (grpo, "sample") if inside == "rollout" else (kind, "add")
    real, lost, calls = getattr(owner, name), kind.lost, iter(range(6))

    def killing(*args):
        kills = next(calls, None) == 3
        if kills and inside != "update":
            kill(gateway)
        if kills and inside == "before update":
            # The client repeats the request that opens an update, so it may bridge the gateway's absence by itself.
            start(gateway)
        result = real(*args)
        if kills and inside == "update":
            kill(gateway)
        return result

    def noticed(sending):
        if gateway.process.poll() is not None:
            start(gateway)
        lost(sending)

    monkeypatch.setattr(owner, name, killing)
    monkeypatch.setattr(kind, "lost", noticed)
    grpo.train(arguments(gateway, "--transport", transport, "--folder", folder, "--out", tmp_path, steps=6))
    assert inside == "before update" or "the server fails, waiting for it" in capsys.readouterr().out
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert transport == "live" or max(row["mismatch_max"] for row in rows) < 1e-3
    assert [weights_step(engine) for engine in engines] == [6, 6]
    assert engines[0].checksums() == engines[1].checksums()
    assert [engine.metric("refit:weight_transaction_open") for engine in engines] == [0, 0]


def test_a_run_whose_server_does_not_come_back_ends_with_the_reason(monkeypatch):
    script = str(ROOT / "examples/grpo/grpo.py")
    monkeypatch.setattr(sys, "argv", [script, "--url", "http://127.0.0.1:9", "--patience", "1"])
    # Python prints the text of this error without a traceback, and ends with 1.
    with pytest.raises(SystemExit, match="^the run ends: http://127.0.0.1:9 "):
        runpy.run_path(script, run_name="__main__")


def test_a_refusal_ends_the_run_with_its_reason(serve, tmp_path):
    server = serve(MODEL, *FLAGS)
    with pytest.raises(refit.RefitError, match="model-root"):
        grpo.train(arguments(server, "--transport", "file", "--folder", tmp_path, "--patience", 5))


def test_the_script_for_gpus_runs_on_a_cpu(tmp_path):
    options = ["--device", "cpu", "--size", "tiny", "--steps", "2", "--tokens", "8", "--prompts", "2", "--samples", "2"]
    rows = on_gpu.main([*options, "--json", str(tmp_path / "rows.json"), "--flag=--threads=1"])
    assert [row["transport"] for row in rows] == list(sender.TRANSPORTS)
    assert all(row["mismatch"] < 0.05 and row["update_ms"] > 0 for row in rows)
    assert json.loads((tmp_path / "rows.json").read_text()) == rows


def test_refit_demo_trains_and_leaves_no_process(tmp_path):
    log = open(tmp_path / "log", "w+")
    mark = f"refit-demo-{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(
        [node(), str(ROOT / "bin/refit.js"), "demo", "--port", "0", "--python", sys.executable, "--threads", "1"],
        stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "REFIT_DEMO_MARK": mark},
    )  # fmt: skip
    text = settled(lambda: open(log.name).read(), lambda text: "step   2" in text or process.poll() is not None, 120)
    assert "step   2" in text and re.search(r"open http://127\.0\.0\.1:\d+/ui ", text), text
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    # torch's manager of shared memory has a session of its own, and waits for two seconds for another client.
    assert settled(lambda: marked(mark), lambda left: left == [], 20) == []


def marked(mark):
    """The command lines of the processes that have the mark in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark.encode() in file.read():
                    found.append(pathlib.Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
        except OSError:
            pass
    return found
