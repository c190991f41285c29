"""How trainers control vLLM and generate with it: SkyRL, prime-rl, AReaL in its vLLM mode, TRL.

The requests, the headers and the read parts of replies are theirs.
"""

import http.client
import json
import time

import pytest
from engines import Beside, refusal, settled
from server import Refused
from vllm_generation import (  # noqa: F401
    LONG,
    PROMPT,
    SKYRL,
    Control,
    Over,
    at_ease,
    begun,
    generate,
    in_the_midst,
    read,
    steered,
    still,
    update,
)

SKYRL_IPC = pytest.mark.row(13, "SkyRL / CUDA IPC")
REPLAY = pytest.mark.row(16, "SkyRL / MoE replay")
AREAL = pytest.mark.row(19, "AReaL / vLLM NCCL")
AREAL_DISK = pytest.mark.row(20, "AReaL / vLLM disk")
PRIME = pytest.mark.row(22, "prime-rl / NCCL")
NATIVE = pytest.mark.row(30, "vLLM's own client / NCCL, CUDA IPC, disk")


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
    for mode in ("mode=keep", "wait_for_inflight_requests=false", "wait_for_inflight_requests=true"):
        control(f"/pause?{mode}&clear_cache=false")
        waiting = [Beside(lambda: generate(steered, 5)) for _ in range(3)]
        time.sleep(0.3)
        assert not any(each.done for each in waiting), mode
        control("/resume")
        assert [read(each.result())[1] for each in waiting] == ["length"] * 3


@NATIVE
@in_the_midst
def test_wait_lets_running_requests_end_and_refuses_new_ones(steered):
    control = Control(steered)
    running = begun(steered)
    paused = Beside(lambda: Control(steered)("/pause?mode=wait"))
    state = settled(lambda: control("/is_paused", method="GET"), lambda state: state["is_paused"])
    assert state == {"is_paused": True}
    with refusal(503):
        generate(steered, 5)
    assert paused.result() == {"status": "paused"}
    assert steered.metric("refit:num_requests_running") == 0, "they have ended when it is answered"
    assert len(read(running.result())[0]) == LONG
    with refusal(503):
        generate(steered, 5)
    control("/resume")
    assert read(generate(steered, 5))[1] == "length"


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
        assert error.status == 409 and "was cancelled" in error.body
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
    steered.post("/areal_pause_generation", {})
    time.sleep(0.3)
    # The second attempt waits.
    still(loop)
    steered.post("/areal_continue_generation", {})
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
    # Tokens with the largest ids, so that at most positions the best token has a smaller one.
    prompt = list(range(319, 307, -1))
    scored = steered.score([prompt])[0]
    body = dict(token_ids=prompt, sampling_params=dict(max_tokens=1, temperature=1, top_p=1, prompt_logprobs=1))
    rows = steered.post("/inference/v1/generate", body)["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(prompt)
    own = [row[str(token)] for row, token in zip(rows[1:], prompt[1:], strict=True)]
    assert [next(iter(row.values())) for row in rows[1:]] == own, "prime-rl takes the first entry"
    assert any(list(row) != sorted(row, key=int) for row in rows[1:]), "another order than that of the ids"
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
