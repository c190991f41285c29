"""clients/python/refit.py against a real server, with real torch: weights arrive by every transport bit for bit, and no broken update stays hidden."""

import gc
import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import transformers
from conftest import ROOT, Server
from tensors import Model, checksum, coded, shared_files

sys.path.insert(0, str(ROOT / "clients/python"))
import refit  # noqa: E402

FLAGS = ["--dtype", "bfloat16", "--max-total-tokens", 512, "--skip-tokenizer-init"]
WAYS = ["handles", "handles in place", "kept", "kept in place", "upload", "group", "file"]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = Model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def served(model_of, shared_folder):
    """A client for each kind, ranks and letter."""
    servers = {}

    def start(kind="qwen3", ranks=1, which="a"):
        key = kind, ranks, which
        if key not in servers:
            folder = model_of(kind).folder
            servers[key] = Server(folder, *FLAGS, "--tp", ranks, "--model-root", folder, "--model-root", shared_folder)
        return servers[key]

    yield start
    for server in servers.values():
        assert server.stop() == 0


@pytest.fixture(autouse=True)
def nothing_left():
    gc.collect()
    before = set(shared_files())
    yield
    gc.collect()
    assert set(shared_files()) <= before, "what was shared has been given back and freed"


def options_of(way, engines, folder):
    """Options of an update by a way; the group that it uses, or None."""
    transport, _, place = way.partition(" ")
    group = engines.group(backend="gloo", timeout_s=60) if transport == "group" else None
    own = dict(group=group) if group else dict(folder=folder) if transport == "file" else {}
    return dict(transport=transport, in_place=place != "", **own), group


def brought(engine, model, variant):
    assert engine.checksums() == model.checksums(variant)
    assert engine.weights() == {"state": "current"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_b_a_arrives_bit_for_bit_by_every_transport(served, model_of, shared_folder, way, ranks):
    model, client = model_of("qwen3"), refit.Client(served("qwen3", ranks).url)
    options, group = options_of(way, client, shared_folder)
    client.check_weights("reset_tensors")
    # The same memory each time, as a trainer has it.
    named = model.tensors(1)
    for step, variant in enumerate([1, 2, 1]):
        for (name, tensor), (_, values) in zip(named, model.tensors(variant)):
            tensor.copy_(values)
        version = f"{way} {step}"
        with client.update(version=version, bucket_bytes=30_000, expected="all", **options) as update:
            update.add_all(named)
        brought(client, model, variant)
        assert client.version() == version
        assert update.outcome == {client.url: "new"} and update.tensors == len(named)
        # A bucket closes before it would be more than its limit; a larger tensor is alone.
        assert update.requests > 3 or way.startswith("kept")
    if group:
        group.leave()
    if client.kept:
        assert len(client.release_kept()) > 0


def test_kept_tensors_are_sent_once_and_then_only_named(served, model_of, monkeypatch):
    model, client = model_of("qwen3"), refit.Client(served().url)
    offered = []
    monkeypatch.setattr(refit, "pickled", lambda obj, real=refit.pickled: offered.append(1) or real(obj))

    def update(variant, names=None):
        offered.clear()
        with client.update(transport="kept", version=str(variant)) as made:
            made.add_all((name, tensor) for name, tensor in model.tensors(variant) if names is None or name in names)
        return len(offered)

    assert update(1) == 1, "one pickle: one bucket for one rank"
    assert update(2) == 0
    brought(client, model, 2)
    client.call("POST", "/release_kept_tensors", {})
    assert update(3) == 1, "the server had forgotten: handles again"
    brought(client, model, 3)
    assert update(1, names=["model.norm.weight"]) == 1, "another layout: handles again"
    assert client.checksums()["model.norm.weight"] == model.checksums(1)["model.norm.weight"]
    assert update(2) == 1
    brought(client, model, 2)
    client.release_kept()


def test_more_buckets_than_names_that_can_be_kept_go_into_the_last_one(served, model_of):
    model, client = model_of("qwen3"), refit.Client(served().url)
    for variant in (3, 4):
        with client.update(transport="kept", bucket_bytes=1000) as update:
            update.add_all(model.tensors(variant))
        assert update.requests == refit.MOST_KEPT
        brought(client, model, variant)
    client.release_kept()


def test_the_process_keeps_its_own_sharing_strategy(served, model_of):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        model, client = model_of("qwen3"), refit.Client(served().url)
        with client.update() as update:
            update.add_all(model.tensors(5))
        assert update.transport == "handles", "an engine of this machine is sent handles"
        brought(client, model, 5)
        assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_before_anything_was_sent_leaves_the_old_weights(served, model_of, shared_folder, way):
    model, client = model_of("qwen3"), refit.Client(served().url)
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
def test_an_exception_after_a_bucket_says_torn_and_the_next_update_heals(served, model_of, shared_folder, way):
    model, client = model_of("qwen3"), refit.Client(served().url)
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
def test_a_refused_tensor_is_an_error_with_its_code_and_the_end_gives_up(served, model_of, shared_folder, way):
    model, client = model_of("qwen3"), refit.Client(served().url)
    options, group = options_of(way, client, shared_folder)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(refit.RefitError) as refused:
        with client.update(version="broken", **options) as update:
            update.add("model.norm.weight", torch.zeros(63, dtype=torch.bfloat16))
    assert (refused.value.status, refused.value.code) == (400, "WEIGHTS_MISMATCH") and "model.norm.weight" in refused.value.message
    assert update.outcome == {client.url: "old"}
    brought(client, model, 1)
    if group:
        group.leave()


def test_a_bucket_that_was_refused_may_be_sent_again_after_its_cause_is_mended(served, model_of):
    model, client = model_of("qwen3"), refit.Client(served().url)
    with client.update(version="mended", transport="upload") as update:
        update.add_all(model.tensors(3))
        bucket, update.fields["mode"] = update._bucket, "no such mode"
        with pytest.raises(refit.RefitError):
            update.flush()
        del update.fields["mode"]
        assert update._bucket is bucket
    brought(client, model, 3)
    assert client.version() == "mended"


def test_missing_names_fail_the_end_where_all_are_expected(served, model_of):
    model, client = model_of("qwen3"), refit.Client(served().url)
    with client.update(version="whole") as update:
        update.add_all(model.tensors(1))
    with pytest.raises(refit.RefitError) as refused:
        with client.update(version="part", expected="all") as update:
            update.add_all(model.tensors(2)[1:])
    assert (refused.value.status, refused.value.code) == (409, "TRANSACTION_INCOMPLETE") and model.tensors(2)[0][0] in refused.value.message
    assert update.outcome == {client.url: "torn"}
    with client.update(version="again", expected="all") as update:
        update.add_all(model.tensors(2))
    brought(client, model, 2)


@pytest.mark.parametrize("way", WAYS)
def test_several_engines_of_several_ranks_get_the_same(served, model_of, shared_folder, way):
    model = model_of("qwen3")
    clients = refit.Clients([served("qwen3", 1).url, served("qwen3", 2).url, served("qwen3", 1, "b").url])
    options, group = options_of(way, clients, shared_folder)
    for variant in (1, 2):
        clients.check_weights("reset_tensors")
        with clients.paused("retract"), clients.update(version=f"{way} {variant}", bucket_bytes=200_000, **options) as update:
            update.add_all(model.tensors(variant))
        assert set(update.outcome.values()) == {"new"} and len(update.outcome) == 3
        for engine in clients.engines:
            brought(engine, model, variant)
        assert set(clients.version().values()) == {f"{way} {variant}"}
    if group:
        group.leave()
    clients.engines[0].kept.clear()
    clients.release_kept()


def test_a_gateway_is_one_client_of_several_engines(served, model_of):
    model, servers = model_of("qwen3"), [served("qwen3", 1), served("qwen3", 2)]
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
    assert gateway.stop() == 0


def test_an_engine_that_refuses_is_named_and_no_label_moves(served, model_of):
    model = model_of("qwen3")
    good, bad = refit.Client(served("qwen3", 1).url), refit.Client(served("qwen3", 1, "b").url)
    clients = refit.Clients([good, bad])
    with clients.update(version="whole") as update:
        update.add_all(model.tensors(1))
    stranger = bad.json("POST", "/weight_transactions", dict(owner="a stranger"), admin=True)
    with pytest.raises(refit.EnginesFailed) as failed:
        with clients.update(version="broken") as update:
            update.add_all(model.tensors(2))
    assert list(failed.value.errors) == [bad.url] and failed.value.code == "TRANSACTION_OPEN" and "a stranger" in str(failed.value)
    assert update.outcome == {good.url: "old"}
    assert set(clients.version().values()) == {"whole"}
    bad.json("POST", f"/weight_transactions/{stranger['id']}/abort", {}, admin=True)
    with clients.update(version="mended") as update:
        update.add_all(model.tensors(2))
    for engine in clients.engines:
        brought(engine, model, 2)


@pytest.mark.parametrize("way", ["handles", "upload", "group"])
def test_an_engine_that_dies_in_an_update_is_named_and_the_others_say_what_they_hold(served, model_of, shared_folder, way):
    model = model_of("qwen3")
    good, doomed = refit.Client(served("qwen3", 1).url, retries=0), Server(model.folder, *FLAGS)
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


# --- connections that break ---


class Breaking:
    """A proxy that breaks the first connections: before the request is passed on, or after it, before the reply."""

    def __init__(self, port, breaks, after):
        self.port, self.breaks, self.after, self.count = port, breaks, after, 0
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
            if broken:
                server.recv(1)
                client.shutdown(socket.SHUT_RDWR)
                return
            self.pump(server, client)

    @staticmethod
    def pump(source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["handles", "upload", "kept"])
def test_a_lost_reply_is_asked_for_again_and_changes_nothing_else(served, model_of, way, after):
    model, server = model_of("qwen3"), served()
    direct = refit.Client(server.url)
    proxy = Breaking(server.port, 0, after)
    client = refit.Client(proxy.url)
    with client.update(version="retried", transport=way, bucket_bytes=1 << 30) as update:
        for part in (model.tensors(6)[:5], model.tensors(6)[5:]):
            update.add_all(part)
            # The next connection, whatever it asks for.
            proxy.breaks = proxy.count + 1
            update.flush()
        proxy.breaks = proxy.count + 1
    brought(direct, model, 6)
    assert direct.version() == "retried"
    proxy.breaks = proxy.count + 10
    with pytest.raises(refit.RefitError) as lost:
        client.version()
    assert (lost.value.status, lost.value.code) == (0, "NO_REPLY") and proxy.url in str(lost.value)
    client.kept.clear()
    direct.release_kept()
    proxy.listener.close()
    del update
    for path in shared_files(os.getpid()) if not after else []:
        # Nobody can tell whether the server had it; torch's shm manager frees it with the process.
        os.unlink(path)


def test_generation_is_not_repeated_where_a_reply_was_lost(served):
    proxy = Breaking(served().port, 1, True)
    with pytest.raises(refit.RefitError):
        refit.Client(proxy.url).generate([1, 2, 3], dict(max_new_tokens=1))
    assert proxy.count == 1
    proxy.listener.close()


ANSWERS = {
    "/html": (500, "text/html", b"<html><body>upstream went away</body></html>", None),
    "/truncated": (200, "application/json", b'{"weight_version": "x', 4000),
    "/truncated-error": (500, "application/json", b'{"error": {"mess', 4000),
    "/broken-json": (200, "application/json", b'{"weight_version": ', None),
    "/text": (200, "text/plain", b"hello", None),
    "/list-error": (400, "application/json", b"[1]", None),
    "/string-error": (401, "application/json", b'{"error": "Unauthorized"}', None),
    "/fastapi": (422, "application/json", b'{"detail": "no such field"}', None),
    "/not-so": (200, "application/json", b'{"success": false, "message": "it was not"}', None),
    "/stream": (200, "text/event-stream", b'data: {"text": "1"}\n\n', None),
}


class Hostile(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, kind, body, length = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        if self.path == "/early":
            # Refused before the body has been read.
            body = b'{"error": {"message": "too much", "code": "ENOUGH"}}'
            self.connection.sendall(b"HTTP/1.1 413 x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            self.connection.shutdown(socket.SHUT_WR)
            return
        self.path = "/stream"
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hostile():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield refit.Client(f"http://127.0.0.1:{server.server_port}/", retries=0, timeout=5)
    server.shutdown()


@pytest.mark.parametrize("path, status, code, words", [
    ("/html", 500, "HTTP_500", "upstream went away"), ("/truncated", 0, "NO_REPLY", "IncompleteRead"), ("/truncated-error", 500, "HTTP_500", "broke off"),
    ("/broken-json", 200, "BAD_REPLY", "weight_version"), ("/text", 200, "BAD_REPLY", "hello"), ("/list-error", 400, "HTTP_400", "[1]"),
    ("/string-error", 401, "HTTP_401", "Unauthorized"), ("/fastapi", 422, "HTTP_422", "no such field"), ("/not-so", 200, "FAILED", "it was not"),
])  # fmt: skip
def test_whatever_a_server_answers_becomes_one_kind_of_error(hostile, path, status, code, words):
    with pytest.raises(refit.RefitError) as failed:
        hostile.json("GET", path)
    assert (failed.value.status, failed.value.code) == (status, code) and words in failed.value.message


def test_a_stream_that_breaks_off_is_an_error_and_no_end(hostile):
    events = hostile.stream("x")
    assert next(events) == {"text": "1"}
    with pytest.raises(refit.RefitError) as broken:
        next(events)
    assert broken.value.code == "NO_REPLY"


def test_a_refusal_in_the_middle_of_a_body_is_read(hostile):
    with pytest.raises(refit.RefitError) as refused:
        hostile.call("POST", "/early", lambda: iter([bytes(1 << 20)] * 64), length=64 << 20)
    assert (refused.value.status, refused.value.code) in [(413, "ENOUGH"), (0, "NO_REPLY")]


def test_a_server_that_says_nothing_is_a_timeout_and_is_not_asked_again():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = refit.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        with pytest.raises(refit.RefitError) as late:
            client.version()
    assert (late.value.status, late.value.code) == (0, "TIMEOUT")
    with pytest.raises(refit.RefitError) as gone:
        client.version()
    assert gone.value.code == "UNREACHABLE"
    assert client.ready() is False


def test_errors_travel_between_processes():
    import pickle

    one = refit.RefitError(400, "X", "words", "field", "http://a")
    many = pickle.loads(pickle.dumps(refit.EnginesFailed({"http://a": one, "http://b": OSError("gone")})))
    assert many.errors["http://a"].param == "field" and many.code == "X" and str(many.errors["http://a"]) == str(one)


# --- generation and control ---


@pytest.fixture(scope="module")
def adder():
    server = Server(ROOT / "models/adder-base", "--model-root", ROOT / "models", "--api-key", "user", "--admin-api-key", "admin")
    yield refit.Client(server.url, api_key="user", admin_key="admin")
    assert server.stop() == 0


def test_generation_of_texts_ids_batches_and_streams(adder):
    greedy = dict(max_new_tokens=4, temperature=0)
    one = adder.generate("12+34=", greedy)
    assert one["meta_info"]["finish_reason"]["type"] == "stop" and len(one["output_ids"]) == one["meta_info"]["completion_tokens"]
    both = adder.generate(["12+34=", "5+5="], greedy)
    assert [reply["text"] for reply in both][0] == one["text"]
    ids = adder.json("POST", "/tokenize", dict(prompt="12+34="))["tokens"]
    for prompt in (ids, torch.tensor(ids)):
        assert adder.generate(prompt, greedy, return_logprob=True)["output_ids"] == one["output_ids"]
    streamed = list(adder.stream("12+34=", greedy))
    assert streamed[-1]["text"] == one["text"] and len(streamed) > 1
    with pytest.raises(refit.RefitError) as refused:
        adder.generate("12+34=", dict(max_new_tokens="many"))
    assert refused.value.status == 400 and refused.value.code == "INVALID_REQUEST" and "max_new_tokens" in refused.value.message
    with pytest.raises(refit.RefitError):
        next(adder.stream("12+34=", dict(max_new_tokens="many")))


def test_leaving_a_stream_ends_its_request(adder):
    events = adder.stream([1, 2, 3], dict(max_new_tokens=1500, ignore_eos=True))
    next(events)
    events.close()
    adder.flush(timeout_s=5)


def test_control_memory_and_versions(adder):
    assert adder.ready() and adder.health()["status"] == "ok"
    with adder.paused("in_place"):
        assert adder.health()["paused"] == "in_place"
    assert adder.health()["paused"] is None
    adder.set_version("by hand")
    assert adder.version() == "by hand"
    adder.abort()
    adder.release_memory()
    assert adder.weights() == {"state": "asleep", "tags": ["weights", "kv_cache", "cuda_graph"]} and not adder.ready()
    adder.resume_memory()
    assert adder.weights()["state"] == "torn"
    reply = adder.update_from_disk(ROOT / "models/adder", version="from disk")
    assert reply["report"]["tensors"] > 0
    adder.wait_ready(5)
    assert adder.version() == "from disk"
    assert adder.generate("123+456=", dict(max_new_tokens=8, temperature=0))["text"].startswith("579")
    with pytest.raises(refit.RefitError) as refused:
        refit.Client(adder.url, api_key="user").pause()
    assert refused.value.status in (401, 403)


def test_files_are_uploaded_one_by_itself_and_several_as_a_form(served, model_of, tmp_path):
    import safetensors.torch

    model, client = model_of("qwen3"), refit.Client(served().url)
    named = model.tensors(7)
    paths = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    for path, part in zip(paths, (named[:9], named[9:])):
        safetensors.torch.save_file(dict(part), path)
    assert client.upload(*paths, version="form")["upload"]["files"] == 2
    brought(client, model, 7)
    whole = tmp_path / "whole.safetensors"
    safetensors.torch.save_file(dict(model.tensors(8)), whole)
    assert client.upload(whole, version="file", flush_cache=False, abort_all_requests=True)["upload"]["files"] == 1
    brought(client, model, 8)
    client.upload(named[:4], named[4:], version="tensors")
    brought(client, model, 7)
    assert client.version() == "tensors"
    body = refit.SafetensorsBody(named)
    written = safetensors.torch.load(b"".join(body.parts()))
    assert body.length == sum(len(part) for part in body.parts()) and all(torch.equal(written[name], tensor) for name, tensor in named)
    with pytest.raises(TypeError, match="int8"):
        refit.SafetensorsBody([("x", torch.zeros(2, dtype=torch.int8))])


# --- models ---


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe", "llama"])
@pytest.mark.parametrize("way", ["handles", "upload"])
def test_a_model_of_transformers_is_sent_by_its_checkpoint_names(served, model_of, kind, way):
    model, client = model_of(kind), refit.Client(served(kind).url)
    torch.manual_seed(len(kind))
    trained = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    trained.save_pretrained(model.folder / "trained")
    client.check_weights("reset_tensors")
    # What is rounded here is what the engine would round.
    with client.update(version="trained", transport=way, dtype=torch.bfloat16) as update:
        update.add_all(torch.compile(trained) if way == "upload" else trained)
    sums = client.checksums()
    import safetensors.torch

    saved = safetensors.torch.load_file(model.folder / "trained/model.safetensors")
    wanted = {name: checksum(tensor.to(torch.bfloat16)) for name, tensor in saved.items()}
    assert sums == {name: wanted[name] for name in sums} and client.weights()["state"] == "current"


def test_odd_views_and_dtypes(served, model_of):
    model, client = model_of("qwen3"), refit.Client(served().url)
    for way in ("handles", "upload", "handles in place", "kept"):
        named = [(name, tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], 1)[:, 0]) for name, tensor in model.tensors(9)]
        with client.update(transport=way.split(" ")[0], in_place=" " in way) as update:
            for index, (name, tensor) in enumerate(named):
                update.add(name, tensor.to(torch.float32) if index % 3 == 0 else tensor)
        brought(client, model, 9)
        client.check_weights("reset_tensors")
    with pytest.raises(ValueError, match="merge_and_unload"):
        layer = torch.nn.Module()
        layer.lora_A = torch.nn.Linear(2, 2)
        with client.update() as update:
            update.add_all(layer)
    with client.update() as update:
        update.add_all(model.tensors(1))
    client.release_kept()


def test_wrong_options_are_refused_before_anything_is_asked():
    client = refit.Client("http://127.0.0.1:1")
    for options in (dict(transport="pigeon"), dict(transport="group"), dict(transport="file")):
        with pytest.raises(ValueError):
            client.update(**options)
    for url in ("127.0.0.1:30000", "ftp://x", "http://"):
        with pytest.raises(ValueError):
            refit.Client(url)


SHARDED = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import transformers
    sys.path.insert(0, {client!r})
    import refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, way, url, out = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    client = refit.Client(url)
    ranks = dist.group.WORLD
    group = client.group(backend="gloo") if way == "group" else None
    for step in range(1, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.25 * step)
        with client.update(version=f"{{way}} {{step}}", transport=way, process_group=ranks, bucket_bytes=60_000, group=group) as update:
            update.add_all(model)
        assert update.requests > 3, update.requests
        dist.barrier()
    # Rank 0 is refused: all of them hear of it, and nobody waits for ever.
    try:
        with client.update(version="refused", transport=way, process_group=ranks, group=group) as update:
            update.add("no.such.weight", torch.zeros(4, dtype=torch.bfloat16))
        raise SystemExit("nothing was refused")
    except refit.RefitError as error:
        assert error.code == "WEIGHTS_UNKNOWN_NAME", error
    if dist.get_rank() == 0:
        assert update.outcome == {{client.url: "old"}}, update.outcome
        if group is not None:
            group.leave()
    whole = {{name: tensor.full_tensor() for name, tensor in model.state_dict().items()}}
    if dist.get_rank() == 0:
        torch.save(whole, out)
        client.release_kept()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("way, ranks", [("handles", 1), ("handles", 2), ("kept", 2), ("upload", 1), ("group", 2)])
def test_a_model_sharded_over_two_processes_is_gathered_and_sent(served, model_of, tmp_path, way, ranks):
    model, server = model_of("qwen3"), served("qwen3", ranks)
    script, out = tmp_path / "trainer.py", tmp_path / "whole.pt"
    script.write_text(textwrap.dedent(SHARDED.format(client=str(ROOT / "clients/python"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(script), str(model.folder), way, server.url, str(out)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    client = refit.Client(server.url)
    whole = torch.load(out)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in whole.items()}
    assert client.version() == f"{way} 3"
    assert client.weights() == {"state": "current"}


def test_a_group_that_broke_is_made_anew(served, model_of):
    model = model_of("qwen3")
    client = refit.Client(served().url)
    with client.group(backend="gloo", timeout_s=20) as group:
        with client.update(group=group) as update:
            update.add_all(model.tensors(1))
        client.call("POST", "/destroy_weights_update_group", dict(group_name=group.name), admin=True)
        with pytest.raises(refit.RefitError):
            with client.update(group=group) as update:
                update.add_all(model.tensors(2))
        with client.update(group=group) as update:
            update.add_all(model.tensors(2))
        brought(client, model, 2)


def test_a_group_that_an_engine_refuses_is_an_error_at_once(served):
    clients = refit.Clients([served("qwen3", 1).url, served("qwen3", 1, "b").url])
    with pytest.raises(refit.RefitError) as refused:
        clients.group(backend="nccl", timeout_s=20).join()
    assert refused.value.code == "GROUP_REFUSED"
    # One refuses, the other is let go.
    with clients.engines[0].group(backend="gloo", name="taken"):
        with pytest.raises(refit.RefitError) as refused:
            clients.group(backend="gloo", name="taken", timeout_s=20).join()
        assert refused.value.code == "CONFLICT" or any(error.code == "CONFLICT" for error in refused.value.errors.values())
    with clients.group(backend="gloo", name="taken", timeout_s=20):
        pass


def test_the_module_needs_nothing_but_the_standard_library(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / 'clients/python')!r})
before = set(sys.modules)
import refit
client = refit.Client("http://127.0.0.1:1", retries=0)
assert not client.ready()
print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'requests', 'safetensors', 'transformers')])
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_written_into_a_folder_is_a_checkpoint(served, model_of, shared_folder):
    import safetensors.torch

    model, client = model_of("qwen3"), refit.Client(served().url)
    with client.update(version="step/1", folder=shared_folder, bucket_bytes=100_000) as update:
        update.add_all(model.tensors(2))
    folder = pathlib.Path(shared_folder, "step_1")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert not list(folder.glob("*.part")) and set(index) == set(model.shapes)
    for name, file in index.items():
        assert torch.equal(safetensors.torch.load_file(folder / file)[name], coded(2, name, model.shapes[name]))
