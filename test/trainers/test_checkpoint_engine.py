"""checkpoint-engine's parameter server, from its released wheel, against a server with two ranks."""

import itertools

import pytest
from distributed_group import free_port

pytest.importorskip("pydantic", reason="checkpoint-engine's metadata are pydantic models")
NAMES = (f"step-{count}" for count in itertools.count())


@pytest.fixture
def ranks(engines, trainer):
    """A function that runs a command on two ranks of a parameter server at once, and the engine."""
    engine, port, processes = engines("qwen3", 2), free_port(), []
    shapes = [[name, list(shape)] for name, shape in engine.shapes.items()]

    def together(do, **arguments):
        for process in processes:
            process.begin(do, **arguments)
        return [process.end() for process in processes]

    for rank in range(2):
        processes.append(trainer("checkpoint_engine_rank.py"))
        processes[-1].begin("start", rank=rank, world=2, port=port, url=engine.url, shapes=shapes)
    for process in processes:
        process.end()
    return together, engine


def test_two_ranks_update_two_ranks(ranks):
    together, engine = ranks
    engine.spoil()
    for variant in [1, 2]:
        first, second = together("update", name=next(NAMES), variant=variant)
        assert first["reply"][0] == 200 and first["failed"] is second["failed"] is None
        engine.holds(variant)


def test_a_refusal_in_the_only_bucket_ends_all_ranks(ranks):
    """checkpoint-engine ignores the reply to its last bucket, so only the HTTP reply reports the refusal."""
    together, engine = ranks
    together("update", name=next(NAMES), variant=1)
    for variant in [2, 3]:
        first, second = together("update", name=next(NAMES), variant=variant, wrong="model.norm.weight")
        status, body = first["reply"]
        assert status == 400 and "model.norm.weight" in body
        assert first["failed"] is second["failed"] is None
        assert engine.get("/server_info")["weights"] == "current"
        engine.holds(1)
    together("update", name=next(NAMES), variant=4)
    engine.holds(4)
