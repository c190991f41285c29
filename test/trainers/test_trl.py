"""TRL's own clients for a vLLM server, from its released wheel."""

import pytest

from engines import refusal
from peft_replies import FLAGS, adapted, check, fill


def started(trainer, engine, kind):
    process = trainer("trl_trainer.py")
    begun = process(kind, url=engine.url, shapes=[[name, list(shape)] for name, shape in engine.shapes.items()])
    return process, begun


@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_starts_and_updates(engines, trainer, ranks):
    engine = engines("qwen3", ranks)
    engine.spoil()
    process, _ = started(trainer, engine, "sync")
    for variant in [1, 2]:
        process("update", variant=variant)
        engine.holds(variant)
    process("one_by_one", variant=3)
    engine.holds(3)


def test_grpo_generates_and_scores(engines, trainer):
    engine = engines("qwen3", 1)
    process, _ = started(trainer, engine, "sync")
    process("update", variant=4)
    made = process("generate", prompts=[[5, 6, 7], [8, 9]])
    assert made["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert [len(ids) for ids in made["completion_ids"]] == [len(values) for values in made["logprobs"]]
    assert len(made["completion_ids"]) == 4
    scores = process("scores", sequences=[[5, 6, 7, 8]], lengths=[2])
    assert scores["actual_token_ids"] == [[[7], [8]]]
    assert [len(values) for values in scores["logprobs"][0]] == [3, 3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_asynchronous_grpo_starts_and_updates(engines, trainer, ranks):
    engine = engines("qwen3", ranks)
    process, begun = started(trainer, engine, "asynchronous")
    assert begun == dict(
        dtype="torch.bfloat16", length=engine.get("/server_info")["context_length"], lora=None, replicas=1
    )
    for variant in [5, 6]:
        process("send", variant=variant)
        engine.holds(variant)
        assert engine.get("/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("ranks", [1, 2])
def test_asynchronous_grpo_syncs_adapters(engines, trainer, tmp_path_factory, ranks):
    """A new name for each version; the oldest one that a request may still name stays loaded."""
    root = tmp_path_factory.mktemp("output")
    engine = engines("qwen3", ranks, "cpu", *FLAGS, "--max-loras", 3, "--model-root", root)
    process = trainer("trl_adapters.py")
    assert process("start", url=engine.url, folder=str(root), staleness=1) is True
    for version in range(1, 5):
        name = f"trl-policy-v{version}"
        assert process("sync", seed=version) == name
        check(engine, name, fill(adapted("qwen3", 1), version, size=0.08))
        loaded = [entry["id"] for entry in engine.get("/v1/models")["data"][1:]]
        assert loaded == [f"trl-policy-v{one}" for one in range(max(1, version - 1), version + 1)]
        assert engine.get("/is_paused") == {"is_paused": False}
        ids, logprobs = process("turn", prompt=[5, 6, 7])
        assert 1 <= len(ids) == len(logprobs) <= 4
    # Requests on the version before go on; an older one is no model any more.
    ids, _ = process("turn", prompt=[5, 6, 7], version=3)
    assert len(ids) >= 1
    with refusal(404):
        engine.post("/v1/completions", dict(model="trl-policy-v1", prompt=[5, 6, 7], max_tokens=1))


def test_asynchronous_grpo_reads_from_the_server_whether_it_takes_adapters(engines, trainer, tmp_path):
    start = dict(folder=str(tmp_path), staleness=4)
    plain = engines("qwen3", 1)
    assert trainer("trl_adapters.py")("start", url=plain.url, **start) is False, "it merges and sends all weights"
    few = engines("qwen3", 1, "cpu", *FLAGS, "--max-loras", 3)
    assert "--max-loras 6" in trainer("trl_adapters.py")("start", url=few.url, **start)
    low = engines("qwen3", 1, "cpu", *FLAGS, "--max-loras", 6, "--max-lora-rank", 4)
    assert "--max-lora-rank 8" in trainer("trl_adapters.py")("start", url=low.url, **start)
