"""How trainers control vLLM and generate with it: SkyRL, prime-rl, AReaL in its vLLM mode, TRL.

The requests, the headers and the read parts of replies are theirs.
"""

import functools
import http.client
import json
import shutil
import time
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import save_file

from engines import GOLDENS, Beside, Engine, refusal, settled
from server import ROOT, Refused, Server
from tensors import coded

SKYRL = pytest.mark.row(12, "SkyRL / NCCL")
SKYRL_IPC = pytest.mark.row(13, "SkyRL / CUDA IPC")
REPLAY = pytest.mark.row(16, "SkyRL / MoE replay")
AREAL = pytest.mark.row(19, "AReaL / vLLM NCCL")
AREAL_DISK = pytest.mark.row(20, "AReaL / vLLM disk")
PRIME = pytest.mark.row(22, "prime-rl / NCCL")
NATIVE = pytest.mark.row(30, "vLLM's own client / NCCL, CUDA IPC, disk")
TRL_SERVE = pytest.mark.row(31, "TRL / `trl vllm-serve`")
TRL = pytest.mark.row(32, "TRL / vLLM native")
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


@SKYRL
@PRIME
@in_the_midst
def test_a_frozen_request_goes_on_and_reports_the_weights_of_each_token(steered):
    """keep: nothing is aborted or retried. The tokens before the pause are those of the old weights."""
    update(steered, 1)
    old, _, _ = read(generate(steered, LONG))
    control = Control(steered)
    pending = begun(steered)
    assert control("/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert control("/is_paused", method="GET") == {"is_paused": True}
    made = steered.metric("refit:generation_tokens_total")
    update(steered, 2)
    assert control("/reset_prefix_cache", {"reset_running_requests": False})["status"] == "ok"
    time.sleep(0.2)
    still(pending)
    assert steered.metric("refit:generation_tokens_total") == made, "frozen"
    assert control("/resume") == {"status": "resumed"}
    reply = pending.result()
    tokens, finish, _ = read(reply)
    assert (finish, len(tokens)) == ("length", LONG)
    if tokens == old:
        raise Over
    first, second = reply["choices"][0]["weight_versions"]
    assert (first["version"], second["version"]) == ("step-1", "step-2")
    assert first["start"] == 0 and first["end"] == second["start"] and second["end"] == LONG
    cut = second["start"]
    assert 20 < cut < LONG and tokens[:cut] == old[:cut]
    assert tokens[cut:] != old[cut:], "the rest is of the new weights"


@SKYRL
@in_the_midst
def test_a_frozen_request_is_computed_again_after_a_reset_of_its_cache(steered):
    update(steered, 1)
    old, _, _ = read(generate(steered, LONG))
    control = Control(steered)
    pending, before = begun(steered), steered.metric("refit:num_preemptions_total")
    control("/pause?mode=keep&clear_cache=false")
    control("/reset_prefix_cache", {"reset_running_requests": True})
    count = settled(lambda: steered.metric("refit:num_preemptions_total"), lambda count: count > before or pending.done)
    still(pending)
    assert count > before
    control("/resume")
    tokens, finish, _ = read(pending.result())
    assert (tokens, finish) == (old, "length"), "of the same weights, the same tokens"


@SKYRL
@in_the_midst
def test_the_cache_can_be_reset_while_an_update_request_is_open(steered):
    control = Control(steered)
    update(steered, 1)
    pending = begun(steered)
    # Without a pause the update stays open until the request ends.
    open_update = Beside(lambda: update(steered, 2))
    time.sleep(0.1)
    assert control("/reset_prefix_cache", {"reset_running_requests": True}) == {"success": True, "status": "ok"}
    still(pending)
    assert not open_update.done
    if control("/abort_requests", {})["aborted"] == 0:
        raise Over
    assert read(pending.result())[1] == "abort"
    assert open_update.result()["success"] is True


@SKYRL
@PRIME
def test_requests_while_paused_wait_with_an_open_connection(steered):
    control = Control(steered)
    for mode in ("keep", "abort", "wait"):
        control(f"/pause?mode={mode}&clear_cache=false")
        waiting = [Beside(lambda: generate(steered, 5)) for _ in range(3)]
        time.sleep(0.3)
        assert not any(each.done for each in waiting), mode
        control("/resume")
        assert [read(each.result())[1] for each in waiting] == ["length"] * 3


@NATIVE
@in_the_midst
def test_wait_lets_running_requests_end_and_holds_new_ones(steered):
    control = Control(steered)
    running = begun(steered)
    paused = Beside(lambda: Control(steered)("/pause?mode=wait"))
    time.sleep(0.1)
    assert control("/is_paused", method="GET") == {"is_paused": True}
    late = Beside(lambda: generate(steered, 5))
    assert paused.result() == {"status": "paused"}
    assert steered.metric("refit:num_requests_running") == 0, "they have ended when it is answered"
    assert len(read(running.result())[0]) == LONG
    # It arrived after the pause.
    still(late)
    control("/resume")
    assert read(late.result())[1] == "length"


@NATIVE
@in_the_midst
def test_a_resume_ends_a_wait_with_an_error(steered):
    running = begun(steered)
    paused = Beside(lambda: Control(steered)("/pause?mode=wait"))
    time.sleep(0.1)
    Control(steered)("/resume")
    try:
        assert paused.result() == {"status": "paused"}
    except Refused as error:
        assert error.status == 409 and "given up" in error.body
    else:
        raise Over
    assert read(running.result())[1] == "length"


@AREAL
@AREAL_DISK
@in_the_midst
def test_a_partial_output_is_continued_until_the_request_is_complete(steered):
    """AReaL's loop: append the output, request the rest, wait while paused."""
    update(steered, 1)

    def completion(prompt, count):
        body = dict(
            prompt=prompt,
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            return_tokens_as_token_ids=True,
            stream=False,
            skip_special_tokens=False,
        )
        reply = steered.post("/v1/completions", body)["choices"][0]
        tokens = [int(token.split(":")[1]) for token in reply["logprobs"]["tokens"]]
        assert len(tokens) == len(reply["logprobs"]["token_logprobs"])
        return tokens, reply["finish_reason"]

    whole, _ = completion(PROMPT, LONG)

    def rollout():
        tokens, finish, asked = [], "abort", 0
        while finish == "abort":
            more, finish = completion(PROMPT + tokens, LONG - len(tokens))
            tokens, asked = tokens + more, asked + 1
        return tokens, finish, asked

    before = steered.metric("refit:generation_tokens_total")
    loop = Beside(rollout)
    settled(lambda: steered.metric("refit:generation_tokens_total") - before, lambda made: made > 20 or loop.done)
    steered.post("/pause", {})
    time.sleep(0.3)
    # The second attempt waits.
    still(loop)
    steered.post("/resume")
    tokens, finish, asked = loop.result()
    if asked == 1:
        raise Over
    assert (finish, asked) == ("length", 2)
    assert tokens == whole


@AREAL_DISK
def test_offload_and_onload_restore_the_weights(steered):
    """AReaL posts {} (level 1), and sends tags in the query with a body {}."""
    update(steered, 1)
    before = generate(steered, 20)["choices"][0]["token_ids"]
    reply = steered.post("/sleep", {})
    assert reply["weights"] == "asleep"
    assert steered.get("/is_sleeping") == {"is_sleeping": True}
    with refusal(503) as found:
        generate(steered, 5)
    assert json.loads(found["body"])["error"]["code"] == "ENGINE_ASLEEP"
    steered.post("/wake_up?tags=weights&tags=kv_cache", {})
    assert steered.get("/is_sleeping") == {"is_sleeping": False}
    assert generate(steered, 20)["choices"][0]["token_ids"] == before
    steered.holds(1)


@SKYRL_IPC
@in_the_midst
def test_weights_wake_up_and_are_written_before_the_cache_wakes_up(steered):
    """SkyRL's synchronous step: sleep at level 2, wake weights, update, wake the cache, and generate without a resume.
    """
    control = Control(steered)
    update(steered, 1)
    pending = begun(steered)
    control("/sleep?level=2")
    tokens, finish, _ = read(pending.result())
    if len(tokens) == LONG:
        raise Over
    assert finish == "abort", "what ran was ended with what it had"
    assert control("/sleep?level=2")["tags"] == [], "a retry changes nothing"
    assert control("/wake_up?tags=weights")["weights"] == "torn"
    assert control("/is_sleeping", method="GET") == {"is_sleeping": True}
    with refusal(503):
        generate(steered, 5)
    update(steered, 2)
    assert control("/wake_up?tags=kv_cache")["weights"] == "current"
    assert control("/wake_up?tags=kv_cache")["tags"] == []
    steered.holds(2)
    assert generate(steered, 5)["choices"][0]["weight_versions"] == [dict(version="step-2", start=0, end=5)]


@SKYRL_IPC
def test_dropped_weights_refuse_generation_until_they_are_written(steered):
    control = Control(steered)
    update(steered, 1)
    control("/sleep?level=2")
    control("/wake_up")
    with refusal(503) as found:
        generate(steered, 5)
    assert json.loads(found["body"])["error"]["code"] == "ENGINE_TORN" and "came back empty" in found["body"]
    update(steered, 1)
    assert read(generate(steered, 5))[1] == "length"


@SKYRL
def test_the_start_requests_the_world_size_by_a_get_with_a_body(steered):
    control = Control(steered)
    for _ in range(2):
        assert control("/get_world_size", {}, "GET") == {"world_size": 1}
        assert control("/health", {}, "GET")["status"] == "ok"
    assert control("/finish_session?session_id=trajectory-7") == {"status": "ok"}
    with refusal(400) as found:
        control("/pause?mode=sleep")
    assert "abort" in found["body"] and "keep" in found["body"]


@PRIME
def test_salts_keep_the_cache_of_one_policy_from_another(steered):
    """prime-rl never resets the cache: each request carries the policy version of its rollout."""
    update(steered, 1)
    steered.post("/reset_prefix_cache")
    prompt = list(range(3, 60))
    headers = {"X-data-parallel-rank": "0"}

    def cached(salt):
        reply = generate(steered, 3, prompt, cache_salt=salt, headers=headers)
        assert reply["usage"]["prompt_tokens"] == len(prompt) and reply["usage"]["completion_tokens"] == 3
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("1"), cached("2"), cached("1"), cached("2")] == [0, 0, 48, 48]
    with refusal(400):
        cached("")


@PRIME
def test_scores_of_a_prompt_are_those_of_the_model(steered):
    update(steered, 1)
    scored = steered.score([PROMPT])[0]
    body = dict(token_ids=PROMPT, sampling_params=dict(max_tokens=1, temperature=1, top_p=1, prompt_logprobs=1))
    rows = steered.post("/inference/v1/generate", body)["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(PROMPT)
    own = [row[str(token)] for row, token in zip(rows[1:], PROMPT[1:], strict=True)]
    assert [entry["logprob"] for entry in own] == scored
    for row, entry in zip(rows[1:], own, strict=True):
        best = min(row.values(), key=lambda one: one["rank"])
        assert best["rank"] == 1 and best["logprob"] >= entry["logprob"]
        assert entry["rank"] == (1 if entry is best else 2)


@PRIME
def test_probes_and_the_model_list(steered):
    assert steered.get("/liveness") == {"status": "ok"}
    assert steered.get("/v1/models")["data"][0]["id"]
    # httpx sends no body.
    connection = http.client.HTTPConnection("127.0.0.1", steered.port, timeout=60)
    for path in ("/pause?mode=keep&clear_cache=false", "/resume"):
        connection.request("POST", path, headers={"content-length": "0", "content-type": "application/json"})
        reply = connection.getresponse()
        assert (reply.status, bool(json.loads(reply.read()))) == (200, True)


@NATIVE
def test_the_checker_proves_that_an_update_is_complete(steered):
    update(steered, 1)
    checksums = steered.post("/weight_checker", dict(action="checksum"))["checksums"]
    assert set(checksums) == {f"dp0:pp0:pcp0:tp0:{name}" for name in steered.shapes}
    assert steered.post("/weight_checker", dict(action="reset")) == {"status": "reset"}
    spoiled = steered.post("/weight_checker", dict(action="compare", baseline=checksums))
    assert spoiled["match"] is False and len(spoiled["mismatches"]) == len(steered.shapes)
    update(steered, 1)
    assert steered.post("/weight_checker", dict(action="compare", baseline=checksums))["match"] is True
    assert steered.get("/weight_info") == {"weight_version": "step-1"}


@NATIVE
def test_a_stream_has_the_tokens_of_the_reply(steered):
    update(steered, 1)
    whole = generate(steered, 30)["choices"][0]
    body = json.dumps(
        dict(
            token_ids=PROMPT,
            stream=True,
            stream_options=dict(include_usage=True),
            sampling_params=dict(max_tokens=30, temperature=0, ignore_eos=True, logprobs=0),
        )
    )
    connection = http.client.HTTPConnection("127.0.0.1", steered.port, timeout=60)
    connection.request("POST", "/inference/v1/generate", body, {"content-type": "application/json"})
    frames = [frame.removeprefix("data: ") for frame in connection.getresponse().read().decode().split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 30
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]] == [
        entry["logprob"] for entry in whole["logprobs"]["content"]
    ]
    assert choices[-1]["finish_reason"] == "length" and choices[-1]["weight_versions"] == whole["weight_versions"]


@REPLAY
def test_a_model_without_experts_reports_none(steered):
    update(steered, 1)
    reply = generate(steered, 5, path="/skyrl/v1/generate")
    assert reply["choices"][0]["routed_experts"] is None
    assert read(reply) == read(generate(steered, 5))


@pytest.fixture(scope="module")
def talking():
    """A trained model with its tokenizer and template."""
    server = Server(ROOT / "models/adder-base", "--threads", 2, "--max-total-tokens", 2048)
    yield server
    server.stop()


def trl_rows(logprobs):
    """Reads the logprobs of completions as TRL does: by token id, best first."""
    rows = []
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        items = sorted({token: logprob, **(top or {})}.items(), key=lambda item: -item[1])
        rows.append([(int(name.removeprefix("token_id:")), score) for name, score in items])
    return rows


@TRL
def test_trl_generates_by_completions_and_chat(talking):
    model = talking.get("/v1/models")["data"][0]["id"]
    assert talking.get("/get_world_size")["world_size"] == 1
    common = dict(
        model=model,
        n=2,
        repetition_penalty=1.0,
        temperature=0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=6,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    choices = talking.post("/v1/completions", dict(prompt=["1+2=", "30+4="], logprobs=2, **common))["choices"]
    assert len(choices) == 4
    for prompt, choice in zip(["1+2=", "1+2=", "30+4=", "30+4="], choices, strict=True):
        assert (
            choice["prompt_token_ids"]
            == talking.post("/tokenize", dict(model=model, prompt=prompt, add_special_tokens=True))["tokens"]
        )
        rows = trl_rows(choice["logprobs"])
        assert [row[0][0] for row in rows] == choice["token_ids"], "greedy: the token is the best"
        assert all(len(row) in (2, 3) for row in rows)
    message = [dict(role="user", content="1+2=")]
    reply = talking.post("/v1/chat/completions", dict(messages=message, logprobs=True, top_logprobs=0, **common))
    rendered = talking.post("/v1/chat/completions/render", dict(model=model, messages=message, max_tokens=1))
    assert reply["prompt_token_ids"] == rendered["token_ids"] and rendered["features"] is None
    for choice in reply["choices"]:
        assert [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]] == choice[
            "token_ids"
        ]
    assert talking.post("/reset_prefix_cache")["success"] is True


@TRL
@TRL_SERVE
def test_trl_scores_sequences_as_a_teacher(talking):
    """By completions with prompt_logprobs, as TRL does now, and by the route of its older server."""
    ids = talking.post("/tokenize", dict(prompt="12+34=46"))["tokens"]
    sequences, lengths = [ids, ids[:-2]], [3, 2]
    choices = talking.post("/v1/completions", dict(prompt=sequences, max_tokens=1, temperature=1.0, prompt_logprobs=4))[
        "choices"
    ]
    now = []
    for choice, sequence, length in zip(choices, sequences, lengths, strict=True):
        rows = []
        for position in range(length, len(choice["prompt_logprobs"])):
            scores = choice["prompt_logprobs"][position]
            assert str(sequence[position]) in scores
            rows.append(
                [
                    (int(token), entry["logprob"])
                    for token, entry in sorted(scores.items(), key=lambda item: item[1]["rank"])
                ]
            )
        now.append(rows)
    reply = talking.post(
        "/get_sequence_logprobs/",
        dict(sequences=sequences, prompt_lengths=lengths, top_logprobs=4, temperature=1.0, response_format="json"),
    )
    before = [
        [list(zip(tokens, scores, strict=True)) for tokens, scores in zip(*rows, strict=True)]
        for rows in zip(reply["logprob_token_ids"], reply["logprobs"], strict=True)
    ]
    assert before == now
    binary = talking.post(
        "/get_sequence_logprobs/",
        dict(sequences=sequences, prompt_lengths=lengths, top_logprobs=4, temperature=1.0, response_format="binary"),
    )
    import base64

    array = lambda name, dtype: torch.frombuffer(bytearray(base64.b64decode(binary[name])), dtype=dtype)  # noqa: E731
    scores = array("logprobs_b64", torch.float32).reshape(binary["shape"])
    tokens = array("token_ids_b64", torch.int32).reshape(binary["shape"])
    assert binary["completion_lengths"] == [len(rows) for rows in now]
    for sequence, rows in enumerate(now):
        for position, row in enumerate(rows):
            assert tokens[sequence, position].tolist() == [token for token, _ in row[:4]]
            assert torch.allclose(scores[sequence, position], torch.tensor([score for _, score in row[:4]]))


@TRL_SERVE
def test_trl_vllm_serve_generates(talking):
    """TRL's own server: paths end in a slash, and replies are parallel lists."""
    assert talking.get("/health/")["status"] == "ok"
    assert talking.get("/get_world_size/") == {"world_size": 1}
    fields = dict(
        n=2,
        repetition_penalty=1.0,
        temperature=0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_tokens=5,
        logprobs=1,
        structured_outputs_regex=None,
        generation_kwargs={},
    )
    reply = talking.post("/generate/", dict(prompts=["1+2=", "30+4="], images=None, **fields))
    assert reply["prompt_ids"] == [
        talking.post("/tokenize", dict(prompt=prompt))["tokens"] for prompt in ("1+2=", "30+4=")
    ]
    assert len(reply["completion_ids"]) == len(reply["logprobs"]) == len(reply["logprob_token_ids"]) == 4
    for ids, scores, tokens in zip(reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True):
        assert [row[0] for row in tokens] == ids and [len(row) for row in scores] == [len(row) for row in tokens]
        assert all(row == sorted(row, reverse=True) for row in scores)
    again = talking.post("/generate/", dict(prompts=reply["prompt_ids"], **fields))
    assert again["completion_ids"] == reply["completion_ids"], "token ids are taken as they are"
    chat = talking.post(
        "/chat/", dict(messages=[[dict(role="user", content="1+2=")]], tools=None, chat_template_kwargs={}, **fields)
    )
    assert len(chat["prompt_ids"]) == 1 and len(chat["completion_ids"]) == 2
