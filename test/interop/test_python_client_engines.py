"""clients/python/refit with several engines and with process groups."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT, SMALL, Server
from python_client import WAYS, brought, options_of, refit

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("way", WAYS)
def test_several_engines_of_several_ranks_get_the_same_weights(engine_of, model_of, shared_folder, way):
    model = model_of("qwen3")
    clients = refit.Clients([engine_of("qwen3", 1).url, engine_of("qwen3", 2).url, engine_of("qwen3", 1, "b").url])
    options, group = options_of(way, clients, shared_folder)
    for variant in (1, 2):
        clients.check_weights("reset_tensors")
        with (
            clients.paused("retract"),
            clients.update(version=f"{way} {variant}", bucket_bytes=200_000, **options) as update,
        ):
            update.add_all(model.tensors(variant))
        assert set(update.outcome.values()) == {"new"} and len(update.outcome) == 3
        for engine in clients.engines:
            brought(engine, model, variant)
        assert set(clients.version().values()) == {f"{way} {variant}"}
    if group:
        group.leave()
    clients.engines[0].kept.clear()
    clients.release_kept()


def test_a_gateway_is_one_client_of_several_engines(engine_of, model_of):
    model, servers = model_of("qwen3"), [engine_of("qwen3", 1), engine_of("qwen3", 2)]
    for server in servers:
        with refit.Client(server.url).update(version="before") as update:
            update.add_all(model.tensors(9))
    gateway = Server(None, *[flag for server in servers for flag in ("--engine", server.url)], command="gateway")
    client = refit.Client(gateway.url)
    for variant, way in enumerate(["handles", "kept", "kept", "upload", "group"], 1):
        options, group = options_of(way, client, None)
        with client.update(version=way, bucket_bytes=100_000, **options) as update:
            update.add_all(model.tensors(variant))
        for server in servers:
            brought(refit.Client(server.url), model, variant)
        assert client.version() == way
        if group:
            group.leave()
    client.release_kept()
    gateway.stop()


def test_an_engine_that_refuses_is_named_and_no_label_moves(engine_of, model_of):
    model = model_of("qwen3")
    good, bad = refit.Client(engine_of("qwen3", 1).url), refit.Client(engine_of("qwen3", 1, "b").url)
    clients = refit.Clients([good, bad])
    with clients.update(version="whole") as update:
        update.add_all(model.tensors(1))
    stranger = bad.json("POST", "/weight_transactions", dict(owner="a stranger"), admin=True)
    with pytest.raises(refit.EnginesFailed) as failed:
        with clients.update(version="broken") as update:
            update.add_all(model.tensors(2))
    assert (
        list(failed.value.errors) == [bad.url]
        and failed.value.code == "TRANSACTION_OPEN"
        and "a stranger" in str(failed.value)
    )
    assert update.outcome == {good.url: "old"}
    assert set(clients.version().values()) == {"whole"}
    bad.json("POST", f"/weight_transactions/{stranger['id']}/abort", {}, admin=True)
    with clients.update(version="mended") as update:
        update.add_all(model.tensors(2))
    for engine in clients.engines:
        brought(engine, model, 2)


@pytest.mark.parametrize("way", ["handles", "upload", "group"])
def test_an_engine_that_dies_in_an_update_is_named_and_the_others_report_their_state(
    engine_of, model_of, shared_folder, way
):
    model = model_of("qwen3")
    good, doomed = refit.Client(engine_of("qwen3", 1).url, retries=0), Server(model.folder, *SMALL)
    clients = refit.Clients([good, refit.Client(doomed.url, retries=0)])
    options, group = options_of(way, clients, shared_folder)
    with pytest.raises(refit.RefitError) as failed:
        with clients.update(version="broken", **options) as update:
            update.add_all(model.tensors(2)[:4])
            update.flush()
            doomed.process.kill()
            doomed.process.wait()
            update.add_all(model.tensors(2)[4:8])
    assert doomed.url in str(failed.value)
    assert update.outcome[good.url] == "torn" and isinstance(update.outcome[doomed.url], refit.RefitError)
    with good.update(version="alone") as update:
        update.add_all(model.tensors(1))
    brought(good, model, 1)


def test_a_broken_group_is_replaced(engine_of, model_of):
    model = model_of("qwen3")
    client = refit.Client(engine_of().url)
    with client.group(backend="gloo", timeout_s=60) as group:
        with client.update(group=group) as update:
            update.add_all(model.tensors(1))
        client.call("POST", "/destroy_weights_update_group", dict(group_name=group.name), admin=True)
        with pytest.raises(refit.RefitError):
            with client.update(group=group) as update:
                update.add_all(model.tensors(2))
        with client.update(group=group) as update:
            update.add_all(model.tensors(2))
        brought(client, model, 2)


UNREACHED = """
import gc, sys, refit
from safetensors.torch import load_file
url, file = sys.argv[1:]
client, weights = refit.Client(url, retries=0), load_file(file)
group, port = client.group(backend="gloo", timeout_s=3600), client.port
with client.update(group=group) as update:
    update.add_all(weights)
try:
    with client.update(group=group) as update:
        update.add_all(weights)
        client.port = 9
        client._idle.clear()
    raise SystemExit("no error")
except refit.RefitError as error:
    assert error.code == "UNREACHABLE", error
client.port = port
gc.collect()
with client.update(version="again", group=group) as update:
    update.add_all(weights)
group.leave()
"""


def test_a_trainer_goes_on_when_an_engine_does_not_hear_of_a_broadcast(engine_of, model_of):
    """The broken group waits an hour for the engine, and whoever destroys it waits with it."""
    model, client = model_of("qwen3"), refit.Client(engine_of("qwen3", 1).url)
    [file] = model.folder.glob("*.safetensors")
    script = [sys.executable, "-c", UNREACHED, client.url, str(file)]
    subprocess.run(script, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "clients/python")})
    assert client.version() == "again"


def test_a_group_that_an_engine_refuses_is_an_error_at_once(engine_of):
    clients = refit.Clients([engine_of("qwen3", 1).url, engine_of("qwen3", 1, "b").url])
    with pytest.raises(refit.RefitError) as refused:
        clients.group(backend="nccl", timeout_s=60).join()
    assert refused.value.code == "GROUP_REFUSED"
    # One engine refuses, and the other one is released.
    with clients.engines[0].group(backend="gloo", name="taken"):
        with pytest.raises(refit.RefitError) as refused:
            clients.group(backend="gloo", name="taken", timeout_s=60).join()
        assert refused.value.code == "CONFLICT" or any(
            error.code == "CONFLICT" for error in refused.value.errors.values()
        )
    with clients.group(backend="gloo", name="taken", timeout_s=60):
        pass
