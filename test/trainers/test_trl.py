"""TRL's own clients for a vLLM server, from its released wheel."""

import pytest


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
