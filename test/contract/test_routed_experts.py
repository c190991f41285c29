"""How trainers replay the routing of a rollout: the experts of each token, in the forms that trainers read.

The expected experts are the choice of transformers in float32 (test/goldens/make.py). A GPU computes in bfloat16 and
may choose others near a tie.
"""

import base64
import io
import json
import math
import urllib.request

import numpy
import pytest

from engines import GOLDENS, Beside, refusal, settled
from server import Server

REPLAY = pytest.mark.row(16, "SkyRL / MoE replay")
SLIME = pytest.mark.row(1, "slime / NCCL full")
EXTERNAL = pytest.mark.row(6, "slime / external engines")
AREAL = pytest.mark.row(17, "AReaL / SGLang NCCL")
PRIME = pytest.mark.row(22, "prime-rl / NCCL")
NATIVE = pytest.mark.row(30, "vLLM's own client / NCCL, CUDA IPC, disk")
LAYERS, SPARSE, TOP_K, EXPERTS = 3, [0, 2], 2, 8
# (device, ranks)
WAYS = [
    pytest.param(("cpu", 1), id="cpu-tp1"),
    pytest.param(("cpu", 2), id="cpu-tp2"),
    pytest.param(("cuda", 1), id="cuda-tp1", marks=pytest.mark.cards(1)),
]


class Case:
    """A prompt, its continuation, and experts: [tokens, layers, experts per token], zeros in a layer without experts.
    """

    def __init__(self, found):
        self.prompt, self.greedy = found["prompt"], found["greedy"]
        chosen = numpy.frombuffer(base64.b64decode(found["experts"]), numpy.uint8).reshape(-1, len(SPARSE), TOP_K)
        self.experts = numpy.zeros((len(chosen), LAYERS, TOP_K), int)
        self.experts[:, SPARSE] = chosen


CASES = [Case(found) for found in json.loads((GOLDENS / "qwen3-moe/golden.json").read_text())["cases"]]


def serve(device, ranks, *flags):
    own = ["--dtype", "float32", "--threads", 2] if device == "cpu" else []
    return Server(
        GOLDENS / "qwen3-moe",
        "--device",
        device,
        "--tp",
        ranks,
        "--max-total-tokens",
        2048,
        "--skip-tokenizer-init",
        *own,
        *flags,
    )


@pytest.fixture(scope="module", params=WAYS)
def recording(request):
    device, ranks = request.param
    server = serve(device, ranks, "--enable-return-routed-experts")
    server.device = device
    yield server
    server.stop()


def alike(server, got, expected):
    """All experts are equal; on a GPU most are, in each layer."""
    assert got.shape == expected.shape, f"{got.shape}, expected {expected.shape}"
    assert got.min(initial=0) >= 0 and got.max(initial=0) < EXPERTS
    if server.device == "cpu":
        wrong = numpy.argwhere((got != expected).any(-1))
        assert wrong.size == 0, (
            f"{len(wrong)} of {len(got) * LAYERS} choices differ, first (token, layer) {wrong[0]}: "
            f"{got[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
        )
        return
    if len(got) == 0:
        return  # the first generated token already differs
    shares = (numpy.sort(got, -1) == numpy.sort(expected, -1)).all(-1).mean(0)
    assert (shares > 0.8).all(), f"of each layer's choices so many are float32's: {shares}"


def continued(server, case, reply_tokens):
    """A GPU may generate other tokens than float32. The tokens from there on have no reference."""
    if server.device == "cpu":
        assert reply_tokens == case.greedy[: len(reply_tokens)]
        return len(reply_tokens)
    return next((i for i, (a, b) in enumerate(zip(reply_tokens, case.greedy)) if a != b), len(reply_tokens))


def unpacked(packed):
    """SkyRL requires the narrowest type that holds the ids, three sizes, and exactly their bytes."""
    types = {"uint8": numpy.uint8, "int16": numpy.int16, "int32": numpy.int32}
    assert isinstance(packed, dict), "SkyRL reads an object"
    shape, data = packed["shape"], base64.b64decode(packed["data"], validate=True)
    assert len(shape) == 3 and all(type(size) is int for size in shape)
    found = numpy.frombuffer(data, types[packed["dtype"]])
    assert found.size == math.prod(shape)
    assert packed["dtype"] == ("uint8" if found.max(initial=0) < 256 else "int16")
    return found.reshape(shape).astype(int)


@REPLAY
def test_a_reply_has_the_experts_of_all_tokens_but_the_last(recording):
    for case in CASES:
        sampling = dict(max_tokens=len(case.greedy), temperature=0, ignore_eos=True, logprobs=0)
        choice = recording.post(
            "/skyrl/v1/generate", dict(sampling_params=sampling, model="policy", token_ids=case.prompt)
        )["choices"][0]
        got = unpacked(choice["routed_experts"])
        assert (
            got.shape == (len(case.prompt) + len(choice["token_ids"]) - 1, LAYERS, TOP_K)
            and choice["finish_reason"] == "length"
        )
        rows = len(case.prompt) + continued(recording, case, choice["token_ids"]) - 1
        alike(recording, got[:rows], case.experts[:rows])


@REPLAY
def test_the_next_turn_has_the_experts_of_cached_tokens(recording):
    case = CASES[-1]
    tokens = case.prompt + case.greedy
    for _ in range(2):
        reply = recording.post(
            "/skyrl/v1/generate",
            dict(sampling_params=dict(max_tokens=4, temperature=0), model="policy", token_ids=tokens),
        )
        alike(recording, unpacked(reply["choices"][0]["routed_experts"])[: len(tokens)], case.experts)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


@REPLAY
@pytest.mark.refused("experts of a server that was not told to record them (400)")
def test_without_the_option_replay_is_refused_with_the_reason():
    """SkyRL reads body.error.message of a 4xx and does not retry."""
    with serve("cpu", 1) as server:
        body = dict(sampling_params=dict(max_tokens=2), model="policy", token_ids=CASES[-1].prompt)
        with refusal(400) as found:
            server.post("/skyrl/v1/generate", body)
        assert "start the server with --enable-return-routed-experts" in json.loads(found["body"])["error"]["message"]
        assert server.post("/inference/v1/generate", body)["choices"][0]["routed_experts"] is None


class Sample:
    """slime appends each reply to its tokens, and the new experts to the known ones."""

    def __init__(self, prompt):
        self.tokens, self.experts = list(prompt), None

    def take(self, meta):
        self.tokens += [entry[1] for entry in meta["output_token_logprobs"]]
        values = numpy.frombuffer(base64.b64decode(meta["routed_experts"]), numpy.int32)
        start = int(meta.get("routed_experts_start_len", 0) or 0)
        rows = max(0, len(self.tokens) - 1 - start)
        assert values.size == rows * LAYERS * TOP_K, f"{values.size} values, slime counts {rows} rows"
        fresh = values.reshape(rows, LAYERS, TOP_K).astype(int)
        if start > 0:
            assert self.experts is not None and len(self.experts) >= start
            fresh = numpy.concatenate([self.experts[:start], fresh])
        self.experts = fresh


def rollout(server, sample, count, **fields):
    body = dict(
        input_ids=sample.tokens,
        sampling_params=dict(max_new_tokens=count, temperature=0, ignore_eos=True, no_stop_trim=True),
        return_logprob=True,
        return_routed_experts=True,
        **fields,
    )
    reply = server.post("/generate", body)
    sample.take(reply["meta_info"])
    return reply["meta_info"]["finish_reason"]["type"]


@EXTERNAL
def test_the_server_reports_that_it_records_experts(recording):
    """slime compares this with the options that it would have used itself."""
    for path in ("/server_info", "/get_server_info"):
        assert recording.get(path)["enable_return_routed_experts"] is True


@SLIME
def test_slime_finds_as_many_rows_as_it_counts(recording):
    for case in CASES:
        sample = Sample(case.prompt)
        assert rollout(recording, sample, len(case.greedy)) == "length"
        rows = len(case.prompt) + continued(recording, case, sample.tokens[len(case.prompt) :]) - 1
        alike(recording, sample.experts[:rows], case.experts[:rows])
        # slime refuses a layer whose experts are all 0.
        assert all(sample.experts[:, layer].any() for layer in SPARSE) or len(sample.experts) < 8


@SLIME
@pytest.mark.parametrize("appends", [False, True])
def test_a_partial_rollout_goes_on_and_has_all_rows(recording, appends):
    case = CASES[-1]
    # A fast machine may finish before the abort.
    for _ in range(10):
        sample = Sample(case.prompt)
        before = recording.metric("refit:generation_tokens_total")
        beside = Beside(lambda: rollout(recording, sample, 400))
        settled(
            lambda: recording.metric("refit:generation_tokens_total") - before, lambda made: made > 20 or beside.done
        )
        recording.post("/abort_request", dict(abort_all=True))
        if beside.result() == "abort":
            break
    assert len(case.prompt) + 20 < len(sample.tokens) < len(case.prompt) + 400
    extra = dict(routed_experts_start_len=len(sample.tokens) - 1) if appends else {}
    assert rollout(recording, sample, 30, **extra) == "length"
    assert recording.get("/flush_cache") is not None
    whole = Sample(sample.tokens)
    whole.tokens.pop()
    last = sample.tokens[-1]
    reply = recording.post(
        "/generate",
        dict(
            input_ids=[*whole.tokens, last],
            sampling_params=dict(max_new_tokens=0),
            return_routed_experts=True,
            return_logprob=True,
        ),
    )
    expected = numpy.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), numpy.int32).reshape(
        -1, LAYERS, TOP_K
    )
    alike(recording, sample.experts, expected.astype(int))


@AREAL
def test_areal_reads_one_row_for_each_token_but_the_last(recording):
    case = CASES[1]
    meta = recording.post(
        "/generate",
        dict(
            input_ids=case.prompt,
            sampling_params=dict(max_new_tokens=8, temperature=0, ignore_eos=True),
            return_logprob=True,
            stream=False,
            return_routed_experts=True,
        ),
    )["meta_info"]
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    got = numpy.frombuffer(base64.b64decode(meta["routed_experts"].encode()), numpy.int32).reshape(rows, -1)
    assert got.shape == (rows, LAYERS * TOP_K)
    sure = len(case.prompt) + continued(recording, case, [entry[1] for entry in meta["output_token_logprobs"]]) - 1
    alike(recording, got.reshape(rows, LAYERS, TOP_K)[:sure].astype(int), case.experts[:sure])


@NATIVE
def test_vllm_s_reply_is_a_npy_file(recording):
    case = CASES[1]
    for start in (0, len(case.prompt) - 1):
        sampling = dict(max_tokens=5, temperature=0, ignore_eos=True, routed_experts_prompt_start=start)
        choice = recording.post("/inference/v1/generate", dict(token_ids=case.prompt, sampling_params=sampling))[
            "choices"
        ][0]
        got = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        assert got.dtype == numpy.uint8 and got.shape == (len(case.prompt) + 5 - 1 - start, LAYERS, TOP_K)
        sure = len(case.prompt) + continued(recording, case, choice["token_ids"]) - 1
        alike(recording, got[: sure - start].astype(int), case.experts[start:sure])


@PRIME
def test_prime_rl_s_reply_has_the_bytes_that_it_searches_for():
    """The client cuts the base64 text out of the reply before it parses the JSON."""
    case = CASES[-1]
    with serve("cpu", 1, "--enable-return-routed-experts", "--dialects", "prime-rl") as server:
        server.device = "cpu"
        tokens, known = list(case.prompt), None
        for _ in range(2):
            sampling = dict(
                max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, stop_token_ids=[], skip_special_tokens=False
            )
            if known is not None:
                # In a later turn, only the rows that earlier turns did not have.
                sampling["routed_experts_prompt_start"] = len(known)
            body = json.dumps(
                dict(model="m", token_ids=tokens, sampling_params=sampling, cache_salt="policy-1")
            ).encode()
            request = urllib.request.Request(
                server.url + "/inference/v1/generate",
                body,
                {"content-type": "application/json", "X-data-parallel-rank": "0"},
            )
            with urllib.request.urlopen(request) as reply:
                raw = reply.read()
            prefix = b'"routed_experts":{"data":"'
            assert raw.count(prefix) == 1
            begin = raw.index(prefix) + len(prefix)
            end = raw.index(b'"', begin)
            choice = json.loads(raw[:begin] + raw[end:])["choices"][0]
            packed = choice["routed_experts"]
            assert (
                packed["data"] == ""
                and packed["dtype"] == "uint8"
                and packed["start"] == (0 if known is None else len(known))
            )
            fresh = (
                numpy.frombuffer(base64.b64decode(raw[begin:end]), packed["dtype"]).reshape(packed["shape"]).astype(int)
            )
            known = fresh if known is None else numpy.concatenate([known, fresh])
            tokens += choice["token_ids"]
            assert len(known) == len(tokens) - 1
        alike(server, known, case.experts[: len(known)])
