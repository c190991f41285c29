"""OpenRLHF's own trainers and generator of samples, from its released wheel, with clients/python/refit_openrlhf.py."""

import pathlib
import time

import pytest
from engines import GOLDENS, ROOT
from tensor_process import Process

pytest.importorskip("aiohttp", reason="OpenRLHF's executors import aiohttp")

PROMPTS = ["12+34=", "5+6=", "789+1="]
REWARDS = """
def reward_func(queries, prompts, labels):
    return dict(rewards=float(len(prompts[0])), scores=0.5, extra_logs={})
"""


@pytest.fixture(scope="module")
def process():
    """OpenRLHF's process: its imports take seconds, so all tests use one."""
    with Process(None, str(pathlib.Path(__file__).with_name("openrlhf_trainer.py"))) as made:
        yield made


@pytest.fixture
def served(engines, process, tmp_path):
    """A function that starts engines, and OpenRLHF's trainer with actors in front of them. Returns the engines."""
    started = []
    (tmp_path / "rewards.py").write_text(REWARDS)

    def start(count=1, ranks=1, sleeps=False):
        made = [engines("qwen3", ranks, which=which) for which in "ab"[:count]]
        place = dict(model=str(GOLDENS / "qwen3"), tokenizer=str(ROOT / "models/adder"), scratch=str(tmp_path))
        rewards = str(tmp_path / "rewards.py")
        process("start", urls=[engine.url for engine in made], ranks=ranks, rewards=rewards, sleeps=sleeps, **place)
        started.extend(made)
        return made

    yield start
    if started:
        process("stop")


def answer(engine, prompt, count):
    """Refit's own answer."""
    settings = dict(max_new_tokens=count, min_new_tokens=count, temperature=0)
    made = engine.post("/generate", dict(input_ids=prompt, sampling_params=settings, return_logprob=True))
    return made["output_ids"], [logprob for logprob, *_ in made["meta_info"]["output_token_logprobs"]]


def answers_as(engine, process, count=6):
    """OpenRLHF's samples are refit's answers. Returns their tokens."""
    made = process("samples", prompts=PROMPTS[:2], count=count)
    assert sorted(one["prompt"] for one in made) == sorted(PROMPTS[:2] * 2), "two samples of each prompt"
    for one in made:
        tokens, logprobs = answer(engine, one["sequence"][:-count], count)
        assert one["tokens"] == tokens and one["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert one["label"] == f"label of {one['prompt']}" and one["truncated"] == [True]
        assert one["reward"] == [len(one["prompt"])]
    return sorted((one["prompt"], one["tokens"]) for one in made)


@pytest.mark.parametrize("count, ranks", [(2, 1), (1, 2)])
def test_rounds_change_the_samples(served, process, count, ranks):
    made = served(count, ranks)
    for engine in made:
        engine.spoil()
    answers = []
    for number, variant in enumerate([21, 22], 1):
        process("update", variant=variant)
        for engine in made:
            engine.holds(variant)
            assert engine.version() == f"openrlhf-{number}"
        answers.append(answers_as(made[0], process))
    assert answers[0] != answers[1]


def test_engines_that_sleep(served, process):
    """--vllm.enable_sleep: weights wake for the update, the cache for the samples."""
    (engine,) = served(sleeps=True)
    answers = []
    for variant in [23, 24]:
        process("update", variant=variant)
        engine.holds(variant)
        made = process("samples", prompts=PROMPTS[:2], count=6)
        assert engine.get("/is_sleeping") == {"is_sleeping": True}
        answers.append(sorted((one["prompt"], one["tokens"]) for one in made))
        assert all(len(one["tokens"]) == len(one["logprobs"]) == 6 for one in made)
    assert answers[0] != answers[1]
    engine.post("/wake_up", {})
    for prompt, tokens in answers[1]:
        sequence = next(one["sequence"] for one in made if one["prompt"] == prompt)
        assert answer(engine, sequence[:-6], 6)[0] == tokens


def test_partial_rollouts_go_on(served, process):
    """--train.partial_rollout_enable: a request keeps its tokens over an update, and the next come from new weights."""
    (engine,) = served()
    process("update", variant=25)
    count = 400
    began = engine.metric("refit:generation_tokens_total")
    process("begin_samples", prompts=PROMPTS[:1], count=count)
    while engine.metric("refit:generation_tokens_total") < began + 30:
        time.sleep(0.005)
    process("update", variant=26)
    engine.holds(26)
    made = process("end_samples")
    prompt = made[0]["sequence"][:-count]
    new = answer(engine, prompt, count)[0]
    process("update", variant=25)
    old = answer(engine, prompt, count)[0]
    for one in made:
        same = next(index for index in range(count) if one["tokens"][index] != old[index])
        assert same > 0 and one["tokens"] != new and len(one["tokens"]) == count
