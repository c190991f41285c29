"""clients/python/refit: generation, control, and the handling of every kind of reply."""

import http.server
import pickle
import socket
import subprocess
import sys
import threading

import pytest
import torch

from conftest import Server
from python_client import refit
from server import free_port
from tensors import ROOT


@pytest.fixture(scope="module")
def adder():
    server = Server(
        ROOT / "models/adder-base", "--model-root", ROOT / "models", "--api-key", "user", "--admin-api-key", "admin"
    )
    yield refit.Client(server.url, api_key="user", admin_key="admin")
    server.stop()


def test_generation_of_texts_ids_batches_and_streams(adder):
    greedy = dict(max_new_tokens=4, temperature=0)
    one = adder.generate("12+34=", greedy)
    assert (
        one["meta_info"]["finish_reason"]["type"] == "stop"
        and len(one["output_ids"]) == one["meta_info"]["completion_tokens"]
    )
    both = adder.generate(["12+34=", "5+5="], greedy)
    assert [reply["text"] for reply in both][0] == one["text"]
    ids = adder.json("POST", "/tokenize", dict(prompt="12+34="))["tokens"]
    for prompt in (ids, torch.tensor(ids)):
        assert adder.generate(prompt, greedy, return_logprob=True)["output_ids"] == one["output_ids"]
    streamed = list(adder.stream("12+34=", greedy))
    assert streamed[-1]["text"] == one["text"] and len(streamed) > 1
    with pytest.raises(refit.RefitError) as refused:
        adder.generate("12+34=", dict(max_new_tokens="many"))
    assert (
        refused.value.status == 400
        and refused.value.code == "INVALID_REQUEST"
        and "max_new_tokens" in refused.value.message
    )
    with pytest.raises(refit.RefitError):
        next(adder.stream("12+34=", dict(max_new_tokens="many")))


def metric(adder, series):
    text = adder.call("GET", "/metrics")
    (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(series)]
    return float(value)


def test_leaving_a_stream_ends_its_request(adder):
    before = metric(adder, "refit:generation_tokens_total")
    events = adder.stream([1, 2, 3], dict(max_new_tokens=1500, ignore_eos=True))
    next(events)
    # While generation is paused, the request cannot end by itself.
    adder.pause("in_place")
    events.close()
    adder.flush(timeout_s=60)
    adder.resume()
    assert metric(adder, "refit:generation_tokens_total") - before < 1500
    assert metric(adder, "refit:num_requests_running") == 0


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
    adder.wait_ready(60)
    assert adder.version() == "from disk"
    assert adder.generate("123+456=", dict(max_new_tokens=8, temperature=0))["text"].startswith("579")
    with pytest.raises(refit.RefitError) as refused:
        refit.Client(adder.url, api_key="user").pause()
    assert refused.value.status in (401, 403)


def test_updates_are_listed_with_their_traces(adder):
    for version in ("one", "two"):
        adder.update_from_disk(ROOT / "models/adder", version=version)
    newest, before, *_ = adder.updates()
    assert [one["label_after"] for one in (newest, before)] == ["two", "one"]
    assert newest["outcome"] == "done" and newest["stall_ms"] <= newest["ms"]["total"]
    trace = adder.update_trace(newest["id"])
    whole = next(event for event in trace["traceEvents"] if event["name"] == f"update {newest['id']}")
    assert abs(whole["dur"] / 1000 - newest["ms"]["total"]) < 0.01
    with pytest.raises(refit.RefitError) as unknown:
        adder.update_trace("a/b?c")
    assert unknown.value.status == 404


def test_wrong_options_are_refused_before_any_request():
    client = refit.Client("http://127.0.0.1:1")
    for options in (dict(transport="pigeon"), dict(transport="group"), dict(transport="file")):
        with pytest.raises(ValueError):
            client.update(**options)
    for url in ("127.0.0.1:30000", "ftp://x", "http://"):
        with pytest.raises(ValueError):
            refit.Client(url)


def test_paused_engines_resume_if_another_one_cannot_pause():
    calls = []

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            calls.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    alive = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(refit.EnginesFailed) as failed:
        with refit.Clients([alive, f"http://127.0.0.1:{free_port()}"], retries=0).paused("in_place"):
            raise AssertionError("not reached")
    server.shutdown()
    assert len(failed.value.errors) == 1 and calls == ["/pause_generation", "/continue_generation"]


def test_errors_travel_between_processes():
    one = refit.RefitError(400, "X", "words", "field", "http://a")
    many = pickle.loads(pickle.dumps(refit.EnginesFailed({"http://a": one, "http://b": OSError("gone")})))
    assert many.errors["http://a"].param == "field" and many.code == "X" and str(many.errors["http://a"]) == str(one)


def test_the_module_needs_nothing_but_the_standard_library(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "clients/python")!r})
before = set(sys.modules)
import refit
client = refit.Client("http://127.0.0.1:1", retries=0)
assert not client.ready()
others = ('torch', 'numpy', 'requests', 'safetensors', 'transformers')
print([name for name in sys.modules if name.split('.')[0] in others])
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
            # The request is refused before its body is read.
            body = b'{"error": {"message": "too much", "code": "ENOUGH"}}'
            self.connection.sendall(
                b"HTTP/1.1 413 x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
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
    yield refit.Client(f"http://127.0.0.1:{server.server_port}/", retries=0, timeout=60)
    server.shutdown()


@pytest.mark.parametrize(
    "path, status, code, words",
    [
        ("/html", 500, "HTTP_500", "upstream went away"),
        ("/truncated", 0, "NO_REPLY", "IncompleteRead"),
        ("/truncated-error", 500, "HTTP_500", "broke off"),
        ("/broken-json", 200, "BAD_REPLY", "weight_version"),
        ("/text", 200, "BAD_REPLY", "hello"),
        ("/list-error", 400, "HTTP_400", "[1]"),
        ("/string-error", 401, "HTTP_401", "Unauthorized"),
        ("/fastapi", 422, "HTTP_422", "no such field"),
        ("/not-so", 200, "FAILED", "it was not"),
    ],
)
def test_every_failed_reply_becomes_one_kind_of_error(hostile, path, status, code, words):
    with pytest.raises(refit.RefitError) as failed:
        hostile.json("GET", path)
    assert (failed.value.status, failed.value.code) == (status, code) and words in failed.value.message


def test_a_stream_that_breaks_off_is_an_error(hostile):
    events = hostile.stream("x")
    assert next(events) == {"text": "1"}
    with pytest.raises(refit.RefitError) as broken:
        next(events)
    assert broken.value.code == "NO_REPLY"


def test_a_refusal_in_the_middle_of_a_body_is_read(hostile):
    with pytest.raises(refit.RefitError) as refused:
        hostile.call("POST", "/early", lambda: iter([bytes(1 << 20)] * 64), length=64 << 20)
    assert (refused.value.status, refused.value.code) in [(413, "ENOUGH"), (0, "NO_REPLY")]


def test_a_server_that_does_not_reply_is_a_timeout_without_a_retry():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        client = refit.Client(f"http://127.0.0.1:{port}", timeout=0.2)
        with pytest.raises(refit.RefitError) as late:
            client.version()
    assert (late.value.status, late.value.code) == (0, "TIMEOUT")
    with pytest.raises(refit.RefitError) as gone:
        client.version()
    assert gone.value.code == "UNREACHABLE"
    assert client.ready() is False
