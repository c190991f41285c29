"""AReaL's own rollout client and FSDP trainer, from its released wheel."""

import pathlib
import time

import pytest
from engines import GOLDENS, refusal
from tensor_process import Process

pytest.importorskip("aiohttp", reason="AReaL's client speaks HTTP with aiohttp")
pytest.importorskip("tenacity", reason="AReaL's client repeats its requests with tenacity")

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
KINDS = ["sglang", "vllm"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def process():
    """AReaL's process: its imports take seconds, so all tests use one."""
    with Process(None, str(pathlib.Path(__file__).with_name("areal_rollout.py"))) as made:
        yield made


@pytest.fixture
def served(engines, process, root, tmp_path_factory):
    """A function that starts an engine and AReaL's client and trainer, connected to it. Returns the engine."""
    started = []

    def start(kind, way="xccl", ranks=1, model="qwen3", flags=(), **options):
        engine, scratch = engines(model, ranks, "cpu", "--model-root", root, *flags), root / str(time.monotonic_ns())
        scratch.mkdir()
        place = dict(model=str(GOLDENS / model), ranks=ranks, scratch=str(scratch))
        process("start", urls=[engine.url], kind=kind, **place, **options)
        started.append(kind)
        process("connect", way=way, chunk_mb=0.1)
        return engine

    yield start
    if started:
        process("stop")


def answer(engine, prompt, count, **fields):
    """Refit's own answer: its tokens and their logprobs."""
    settings = dict(max_new_tokens=count, ignore_eos=True, temperature=0)
    made = engine.post("/generate", dict(input_ids=prompt, sampling_params=settings, return_logprob=True, **fields))
    return made["output_ids"], [logprob for logprob, *_ in made["meta_info"]["output_token_logprobs"]]


def answers_as(engine, process, version, count=6):
    """AReaL's answers are refit's, and they are stamped with the version. Returns the tokens."""
    made = process("generate", prompts=PROMPTS, count=count)
    for one, prompt in zip(made, PROMPTS):
        tokens, logprobs = answer(engine, prompt, count)
        assert one["tokens"] == tokens and one["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert one["versions"] == [version] * count and one["stop"] == "length"
    return [one["tokens"] for one in made]


@pytest.mark.parametrize("kind, ranks", [("sglang", 1), ("sglang", 2), ("vllm", 2)])
def test_broadcasts_change_the_answers(served, process, kind, ranks):
    """Several buckets for each update."""
    engine = served(kind, ranks=ranks)
    engine.spoil()
    answers = []
    for version, variant in enumerate([11, 12], 1):
        process("update", variant=variant, version=version)
        engine.holds(variant)
        answers.append(answers_as(engine, process, version))
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_change_the_answers(served, process, kind):
    engine = served(kind, way="disk")
    engine.spoil()
    answers = []
    for version, variant in enumerate([13, 14], 1):
        assert process("update", variant=variant, version=version) is False, "AReaL removes what it sent"
        engine.holds(variant)
        answers.append(answers_as(engine, process, version))
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_interrupts_long_answers(served, process, kind):
    """The tokens after the update come from the new weights, with the old ones before them as the prompt."""
    engine = served(kind)
    count = 480
    # On a busy machine the answers may end before the pause comes; another try follows then.
    for _ in range(5):
        process("update", variant=15, version=1)
        process("train", variant=16)
        began = engine.metric("refit:generation_tokens_total")
        process("begin", prompts=PROMPTS[:2], count=count)
        while engine.metric("refit:generation_tokens_total") < began + 30:
            time.sleep(0.005)
        process("update", version=2)
        engine.holds(16)
        answers = process("end")
        if all(1 in one["versions"] and 2 in one["versions"] for one in answers):
            break
    for one, prompt in zip(answers, PROMPTS):
        old = one["versions"].count(1)
        assert 0 < old < count and one["versions"] == [1] * old + [2] * (count - old)
        rest, logprobs = answer(engine, prompt + one["tokens"][:old], count - old)
        assert one["tokens"][old:] == rest and one["logprobs"][old:] == pytest.approx(logprobs, abs=1e-4)
        assert one["stop"] == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_memory(served, process, kind):
    """compute_logp of a teacher, and `enable_offload`."""
    engine = served(kind)
    process("update", variant=17, version=1)
    sequence = [5, 6, 7, 8, 9, 10]
    made = engine.post(
        "/generate",
        dict(
            input_ids=sequence, sampling_params=dict(max_new_tokens=1), return_logprob=True, logprob_start_len=0
        ),
    )
    wanted = [logprob for logprob, *_ in made["meta_info"]["input_token_logprobs"]][-4:]
    assert process("score", sequence=sequence, count=4) == pytest.approx(wanted, abs=1e-4)
    process("call", method="offload")
    with refusal():
        answer(engine, PROMPTS[0], 2)
    process("call", method="onload")
    process("update", variant=18, version=2)
    engine.holds(18)
    answers_as(engine, process, 2)


def test_experts_of_a_mixture(served, process):
    engine = served(
        "sglang", model="qwen3-moe", flags=["--enable-return-routed-experts"], return_routed_experts=True
    )
    process("update", variant=19, version=1)
    (made,) = process("generate", prompts=[PROMPTS[1]], count=4)
    config = engine.get("/server_info")
    assert len(made["experts"]) == len(PROMPTS[1]) + 4 - 1, config


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_refused(served, process, kind):
    """AReaL's client reports the refusal, and the weights stay."""
    engine = served(kind, request_retries=1)
    process("update", variant=20, version=1)
    error = process(
        "refused", method="update_weights_from_disk", use_lora=True, lora_name="policy", version=3
    )
    assert "400" in error
    engine.holds(20)
    answers_as(engine, process, 1)
