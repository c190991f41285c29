"""How trainers generate with vLLM and control it: an engine whose requests run for long, and the clients."""

import functools
import http.client
import json
import shutil
import time
import urllib.error
import urllib.request

import pytest
from engines import GOLDENS, Beside, Engine, settled
from safetensors.torch import save_file
from server import Refused
from tensors import coded

SKYRL = pytest.mark.row(12, "SkyRL / NCCL")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
LONG = 3000


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    """An engine that generates for long, and a folder with other weights of its model."""
    roots = tmp_path_factory.mktemp("steered")
    shutil.copytree(GOLDENS / "qwen3", roots / "model")
    config = json.loads((roots / "model/config.json").read_text())
    (roots / "model/config.json").write_text(json.dumps(config | dict(max_position_embeddings=2 * LONG)))
    engine = Engine(roots / "model", 1, "cpu", "--model-root", roots, "--max-total-tokens", 4 * LONG)
    for variant in (1, 2):
        (roots / f"step-{variant}").mkdir()
        save_file(
            {name: coded(variant, name, shape).contiguous() for name, shape in engine.shapes.items()},
            roots / f"step-{variant}/model.safetensors",
        )
    engine.folder = roots
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def at_ease(request):
    yield
    if "steered" in request.fixturenames:
        ease(request.getfixturevalue("steered"))


def ease(engine):
    engine.post("/wake_up")
    engine.post("/resume")
    engine.post("/abort_requests", {})


class Over(Exception):
    """A request ended or overtook another one before the test could act, because the machine was busy."""


def in_the_midst(test):
    """For tests that act on running requests: repeats the test if a request was over. Fails after too many attempts."""

    @functools.wraps(test)
    def tried(steered):
        for _ in range(9):
            try:
                return test(steered)
            except Over:
                ease(steered)
        return test(steered)

    return tried


def update(engine, variant):
    return engine.post(
        "/update_weights_from_disk",
        dict(model_path=str(engine.folder / f"step-{variant}"), weight_version=f"step-{variant}"),
    )


class Control:
    """SkyRL's control plane: one kept connection, no retry, and a JSON body only if the reply has a length."""

    def __init__(self, engine):
        self.connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)

    def __call__(self, path, body=None, method="POST"):
        headers = {} if body is None else {"content-type": "application/json"}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = self.connection.getresponse()
        length = reply.getheader("content-length")
        assert length is not None and reply.getheader("transfer-encoding") is None, (
            f"{path}: a body without a length is taken for none"
        )
        text = reply.read()
        assert int(length) == len(text)
        if text:
            assert reply.getheader("content-type") == "application/json", f"{path}: {reply.getheader('content-type')}"
        found = json.loads(text) if text else None
        if reply.status >= 400:
            raise Refused(reply.status, found["error"]["message"])
        return found


def generate(
    engine, count, prompt=PROMPT, path="/inference/v1/generate", headers=None, timeout=300, sampling=None, **fields
):
    """SkyRL's data plane: 30 attempts a second apart after broken connections and replies without JSON, none after a
    4xx.
    """
    params = dict(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0, **(sampling or {}))
    body = json.dumps(dict(sampling_params=params, model="policy", token_ids=prompt, **fields)).encode()
    for _ in range(30):
        request = urllib.request.Request(
            engine.url + path,
            body,
            {"Content-Type": "application/json", "X-Session-ID": "trajectory-7", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            if error.code < 500:
                raise Refused(error.code, text.decode()) from None
            json.loads(text)
            raise Refused(error.code, text.decode()) from None
        except (ConnectionError, json.JSONDecodeError):
            time.sleep(1)
    raise AssertionError("30 tries did not do")


def read(reply):
    """The parts of a choice that SkyRL reads."""
    choice = reply["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(logprobs) == len(choice["token_ids"])
    return choice["token_ids"], choice["finish_reason"], logprobs


def begun(engine, count=LONG, **fields):
    """A running request that has generated tokens."""
    before = engine.metric("refit:generation_tokens_total")
    beside = Beside(lambda: generate(engine, count, **fields))
    settled(lambda: engine.metric("refit:generation_tokens_total") - before, lambda made: made > 20 or beside.done)
    still(beside)
    return beside


def still(beside):
    """Checks that it still runs; else the test is repeated."""
    if beside.done:
        beside.result()
        raise Over
