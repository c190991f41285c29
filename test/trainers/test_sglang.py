"""SGLang's own client of its HTTP server, from its released wheel."""

import pytest


@pytest.fixture
def started(engines, trainer):
    def start(ranks):
        engine, process = engines("qwen3", ranks), trainer("sglang_trainer.py")
        shapes = [[name, list(shape)] for name, shape in engine.shapes.items()]
        process("start", url=engine.url, ranks=ranks, shapes=shapes)
        return engine, process

    return start


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_updates_in_a_row_write_every_tensor(started, ranks, parts):
    engine, process = started(ranks)
    engine.spoil()
    for variant in [1, 2]:
        process("update", variant=variant, parts=parts)
        engine.holds(variant)


@pytest.mark.parametrize("ranks", [1, 2])
def test_flattened_buckets_write_every_tensor(started, ranks):
    engine, process = started(ranks)
    engine.spoil()
    for variant in [3, 4]:
        assert process("update_by_bucket", variant=variant)["success"] is True
        engine.holds(variant)


def test_it_generates_and_scores(started):
    engine, process = started(1)
    process("update", variant=5)
    made = process(
        "generate",
        input_ids=[5, 6, 7],
        sampling_params=dict(max_new_tokens=4, temperature=0, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[8, 9],
    )
    meta = made["meta_info"]
    assert [id for _, id, _ in meta["output_token_logprobs"]] == made["output_ids"]
    assert [id for _, id, _ in meta["input_token_logprobs"]] == [5, 6, 7]
    assert [[id for _, id, _ in row] for row in meta["output_token_ids_logprobs"]] == [[8, 9]] * 4
    assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 4


def test_memory_is_released_and_resumed_around_an_update(started):
    engine, process = started(1)
    process("sleep_and_wake")
    process("update", variant=6)
    engine.holds(6)
