"""vLLM's trainer engines, NCCL's and CUDA IPC's send_weights, from its released wheel."""

import pytest

from distributed_setup import NCCL, nccl_of_torch

PACKED = dict(packed=True, packed_buffer_size_bytes=30_000)
# Its IPC producer needs room for the largest tensor.
PACKED_IPC = dict(packed=True, packed_buffer_size_bytes=50_000)


def joined(trainer, engine, by="join", **wire):
    process = trainer("vllm_trainer.py")
    shapes = [[name, list(shape)] for name, shape in engine.shapes.items()]
    process(by, url=engine.url, shapes=shapes, world=1 + engine.ranks, **wire)
    return process


def send_three(process, engine):
    """Only the first update announces the tensors."""
    for variant, announced in [(1, len(engine.shapes)), (2, 0), (3, 0)]:
        sent = process("send", variant=variant)
        assert sent["names"] == announced
        assert len(sent["sizes"]) > 1
        engine.holds(variant)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wire", [dict(packed=False), PACKED], ids=["unpacked", "packed"])
def test_three_updates_in_a_row_write_every_tensor(engines, trainer, wire, ranks):
    engine = engines("qwen3", ranks)
    engine.spoil()
    send_three(joined(trainer, engine, **wire), engine)


def test_the_client_ends_its_transfer_and_begins_another(engines, trainer):
    engine = engines("qwen3", 1)
    process = joined(trainer, engine, packed=False)
    process("send", variant=4)
    process("shutdown")
    assert engine.get("/server_info")["weight_groups"] == []
    joined(trainer, engine, packed=False)("send", variant=5)
    engine.holds(5)


def test_a_new_init_forgets_what_was_announced(engines, trainer):
    engine = engines("qwen3", 1)
    joined(trainer, engine, packed=False)("send", variant=4)
    fresh = joined(trainer, engine, **PACKED)
    for variant, announced in [(5, len(engine.shapes)), (6, 0)]:
        assert fresh("send", variant=variant)["names"] == announced
        engine.holds(variant)


@pytest.mark.cards(2)
@pytest.mark.parametrize("wire", [dict(packed=False), PACKED], ids=["unpacked", "packed"])
def test_three_updates_by_nccl_write_every_tensor(engines, trainer, wire):
    engine = engines("qwen3", 1, "cuda:1", env=dict(NCCL, REFIT_NCCL=nccl_of_torch()))
    engine.spoil()
    send_three(joined(trainer, engine, "join_by_nccl", **wire), engine)


def test_an_update_that_repeats_nothing_is_refused(engines, trainer):
    """A 200 that wrote nothing left the trainer's broadcast without a receiver."""
    engine = engines("qwen3", 1)
    joined(trainer, engine, packed=False)("send", variant=4)
    process = joined(trainer, engine, packed=False)
    refused = process("repeat")
    assert refused["status"] == 400 and "names is empty" in refused["text"]
    engine.holds(4)
    process("send", variant=5)
    engine.holds(5)


@pytest.mark.cards(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wire", [dict(packed=False), PACKED_IPC], ids=["unpacked", "packed"])
def test_three_updates_by_cuda_ipc_write_every_tensor(engines, trainer, wire, ranks):
    env = dict(REFIT_CUDA_SHARE_CARD="1") if ranks > 1 else None
    engine = engines("qwen3", ranks, "cuda", env=env)
    engine.spoil()
    process = trainer("vllm_trainer.py")
    shapes = [[name, list(shape)] for name, shape in engine.shapes.items()]
    process("join_by_ipc", url=engine.url, shapes=shapes, **wire)
    for variant in (1, 2, 3):
        sent = process("send_by_ipc", variant=variant)
        assert sent["names"] == len(shapes)
        assert (sent["requests"] > 1) == wire["packed"]
        engine.holds(variant)
