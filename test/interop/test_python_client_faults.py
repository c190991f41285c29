"""clients/python/refit when an update fails: every failure is reported, and the next update repairs the weights."""

import contextlib
import socket
import threading

import pytest
import torch

from python_client import WAYS, brought, options_of, refit
from tensors import remove_shared_files

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_before_anything_was_sent_leaves_the_old_weights(engine_of, model_of, shared_folder, way):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    options, group = options_of(way, client, shared_folder)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(ZeroDivisionError):
        with client.update(version="broken", **options) as update:
            update.add_all(model.tensors(2)[:3])
            1 / 0
    assert update.outcome == {client.url: "old"}
    brought(client, model, 1)
    assert client.version() == "whole"
    assert client.json("GET", "/weight_transactions", admin=True) == {"open": None}
    if group:
        group.leave()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "file"])
def test_an_exception_after_a_bucket_reports_torn_weights_and_the_next_update_repairs_them(
    engine_of, model_of, shared_folder, way
):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    options, group = options_of(way, client, shared_folder)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(ZeroDivisionError):
        with client.update(version="broken", **options) as update:
            update.add_all(model.tensors(2)[:5])
            update.flush()
            1 / 0
    assert update.outcome == {client.url: "torn"}
    state = client.weights()
    assert state["state"] == "torn" and sorted(state["tensors"]) == sorted(name for name, _ in model.tensors(2)[:5])
    assert client.version() == "whole"
    with pytest.raises(refit.RefitError) as refused:
        client.generate([1, 2, 3], dict(max_new_tokens=1))
    assert (refused.value.status, refused.value.code) == (503, "ENGINE_TORN")
    with client.update(version="healed", **options) as update:
        update.add_all(model.tensors(2))
    brought(client, model, 2)
    assert client.version() == "healed"
    if group:
        group.leave()
    client.kept.clear()
    client.release_kept()


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_tensor_is_an_error_with_its_code_and_aborts_the_update(engine_of, model_of, shared_folder, way):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    options, group = options_of(way, client, shared_folder)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(refit.RefitError) as refused:
        with client.update(version="broken", **options) as update:
            update.add("model.norm.weight", torch.zeros(63, dtype=torch.bfloat16))
    assert (refused.value.status, refused.value.code) == (
        400,
        "WEIGHTS_MISMATCH",
    ) and "model.norm.weight" in refused.value.message
    assert update.outcome == {client.url: "old"}
    brought(client, model, 1)
    if group:
        group.leave()


def test_a_refused_bucket_may_be_sent_again_once_it_is_corrected(engine_of, model_of):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    with client.update(version="mended", transport="upload") as update:
        update.add_all(model.tensors(3))
        bucket, update.fields["mode"] = update._bucket, "no such mode"
        with pytest.raises(refit.RefitError):
            update.flush()
        del update.fields["mode"]
        assert update._bucket is bucket
    brought(client, model, 3)
    assert client.version() == "mended"


def test_missing_names_fail_an_update_that_requires_all(engine_of, model_of):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(refit.RefitError) as refused:
        with client.update(version="part", expected="all") as update:
            update.add_all(model.tensors(2)[1:])
    assert (refused.value.status, refused.value.code) == (409, "TRANSACTION_INCOMPLETE") and model.tensors(2)[0][
        0
    ] in refused.value.message
    assert update.outcome == {client.url: "torn"}
    with client.update(version="again", expected="all") as update:
        update.add_all(model.tensors(2))
    brought(client, model, 2)


class Breaking:
    """A proxy that breaks the first connections, before it forwards the request or before it forwards the reply."""

    def __init__(self, port, breaks, after):
        self.port, self.breaks, self.after, self.count, self.idle = port, breaks, after, 0, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            threading.Thread(target=self.serve, args=(client, self.count <= self.breaks), daemon=True).start()

    def serve(self, client, broken):
        if broken and not self.after:
            client.close()
            return
        with socket.create_connection(("127.0.0.1", self.port)) as server, client:
            threading.Thread(target=self.pump, args=(client, server), daemon=True).start()
            self.idle.append(client)
            if broken:
                server.recv(1)
                client.shutdown(socket.SHUT_RDWR)
                return
            self.pump(server, client)

    def break_next(self, count=1):
        """Breaks the next connections, and closes those that the client keeps, as a server that restarts does."""
        self.breaks = self.count + count
        for client in self.idle:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self.idle.clear()

    @staticmethod
    def pump(source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["handles", "upload", "kept"])
def test_a_request_whose_reply_was_lost_is_repeated_without_another_effect(engine_of, model_of, way, after):
    model, server = model_of("qwen3"), engine_of()
    direct = refit.Client(server.url)
    proxy = Breaking(server.port, 0, after)
    client = refit.Client(proxy.url)
    with client.update(version="retried", transport=way, bucket_bytes=1 << 30) as update:
        for part in (model.tensors(6)[:5], model.tensors(6)[5:]):
            update.add_all(part)
            proxy.break_next()
            update.flush()
        proxy.break_next()
    brought(direct, model, 6)
    assert direct.version() == "retried"
    proxy.break_next(10)
    with pytest.raises(refit.RefitError) as lost:
        client.version()
    assert (lost.value.status, lost.value.code) == (0, "NO_REPLY") and proxy.url in str(lost.value)
    client.kept.clear()
    direct.release_kept()
    proxy.listener.close()
    del update
    if not after:
        # Whether the server had opened them is unknown.
        remove_shared_files()


def test_requests_share_a_connection_until_it_has_been_idle_or_a_reply_is_left_unread(engine_of, model_of, monkeypatch):
    model, proxy = model_of("qwen3"), Breaking(engine_of().port, 0, False)
    client = refit.Client(proxy.url)
    with client.update(version="one", transport="upload") as update:
        update.add_all(model.tensors(7))
    client.version()
    assert proxy.count == 1
    for _ in client.stream([1, 2, 3], dict(max_new_tokens=50)):
        break
    client.version()
    assert proxy.count == 2
    monkeypatch.setattr(refit.connection, "MOST_IDLE", 0)
    client.version()
    assert proxy.count == 3
    proxy.listener.close()


def test_a_generation_whose_reply_was_lost_is_not_repeated(engine_of):
    proxy = Breaking(engine_of().port, 1, True)
    with pytest.raises(refit.RefitError):
        refit.Client(proxy.url).generate([1, 2, 3], dict(max_new_tokens=1))
    assert proxy.count == 1
    proxy.listener.close()
