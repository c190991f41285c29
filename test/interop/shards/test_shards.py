"""Updates from the shards of a 4-rank FSDP2 trainer, with real torch processes on gloo, checked tensor by tensor."""

import pytest
import torch

from python_client import refit
from sharded import RankFailed, Trainer
from tensors import MODELS, Model

pytestmark = pytest.mark.usefixtures("nothing_left")
TRANSPORTS = ["handles", "kept", "group", "upload"]


@pytest.fixture(scope="module")
def trainer():
    made = Trainer(4)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def leaves(request):
    yield
    if "trainer" in request.fixturenames:
        request.getfixturevalue("trainer")("leave")


def check(server, model, variant):
    client = refit.Client(server.url)
    assert client.checksums() == model.checksums(variant)
    assert client.weights() == {"state": "current"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_of_4_ranks_arrives_by_every_transport(trainer, engine_of, model_of, ranks, transport):
    engine, model = engine_of("qwen3", ranks), model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    for step, variant in enumerate([1, 2, 3]):
        refit.Client(engine.url).check_weights("reset_tensors")
        options = dict(urls=[engine.url], version=f"{transport} {step}", transport=transport, bucket_bytes=1 << 14)
        answers = trainer("update", variant=variant, **options)
        check(engine, model, variant)
        assert refit.Client(engine.url).version() == f"{transport} {step}"
        assert answers[0]["outcome"] == {engine.url: "new"}
        assert answers[0]["tensors"] == len(model.shapes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_messages_of_nccl_have_the_bytes_of_the_blocks(trainer, engine_of, model_of, ranks):
    engine, model = engine_of("qwen3", ranks), model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("update", variant=3, urls=[engine.url], version="m", transport="group", bucket_bytes=1 << 14)
    stretches, packed = map(sum, zip(*trainer("messages", urls=[engine.url])))
    assert stretches > 40, "large pieces are sent from where they lie"
    assert packed > (40 if ranks == 2 else 0), "an engine of two ranks keeps columns, too"


@pytest.mark.parametrize("transport", ["handles", "group"])
def test_experts_that_transformers_fuses_arrive(trainer, engine_of, model_of, transport):
    engine, model = engine_of("qwen3-moe", 2), model_of("qwen3-moe")
    trainer("setup", kind="qwen3-moe", folder=str(model.folder), mesh=[4])
    for variant in (4, 5):
        trainer("update", urls=[engine.url], version=str(variant), variant=variant, transport=transport)
        check(engine, model, variant)


@pytest.mark.parametrize(
    ("kind", "mesh", "dims"),
    [("llama", [2, 2], ["dp", "tp"]), ("qwen2", [2, 2], ["replicate", "shard"])],
    ids=["tensor parallel under FSDP2", "hybrid, tied"],
)
def test_two_dimensional_meshes_arrive(trainer, engine_of, model_of, kind, mesh, dims):
    engine, model = engine_of(kind, 2), model_of(kind)
    trainer("setup", kind=kind, folder=str(model.folder), mesh=mesh, dims=dims)
    assert any("Strided" in text or "R" in text for text in trainer("placements")[0])
    for variant, transport in ((6, "handles"), (7, "group")):
        trainer("update", urls=[engine.url], version=str(variant), variant=variant, transport=transport)
        check(engine, model, variant)


def test_three_of_four_ranks_hold_uneven_shards_in_float32(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 2), model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[3], ranks=[1, 2, 3], dtype="float32")
    for variant, transport in ((8, "handles"), (9, "upload"), (10, "kept"), (11, "kept")):
        trainer("update", urls=[engine.url], version=str(variant), variant=variant, transport=transport)
        check(engine, model, variant)


def test_interleaved_rows_arrive_where_torch_says_they_are_neighbours(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 2), model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    names = sorted(model.shapes)
    for mesh, cut in (([2, 2], [["shard", 0, 1], ["shard", 0, 2]]), ([2, 2], [["shard", 0, 4], ["shard", 0, 1]])):
        trainer("cut", names=names, variant=12, mesh=mesh, cut=cut)
        refit.Client(engine.url).check_weights("reset_tensors")
        trainer("update", urls=[engine.url], version="strided", what="dict", transport="handles")
        check(engine, model, 12)


def test_flat_parameters_and_sharded_tensors_arrive(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 2), model_of("qwen3")
    trainer("flat_units", folder=str(model.folder), variant=40)
    trainer("update", urls=[engine.url], version="flat", what="flat", transport="handles")
    check(engine, model, 40)
    trainer("leave")
    trainer("sharded_tensors", folder=str(model.folder), variant=41)
    trainer("update", urls=[engine.url], version="sharded", what="sharded", transport="upload")
    check(engine, model, 41)
    refit.Client(engine.url).check_weights("reset_tensors")
    trainer("update", urls=[engine.url], version="chunks", what="checkpoint", transport="handles")
    check(engine, model, 41)


def test_a_forward_pass_without_gradients_changes_nothing(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 1), model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("fill", variant=13)
    trainer("forward")
    trainer("update", urls=[engine.url], version="13", transport="upload")
    check(engine, model, 13)


def test_several_engines_are_updated_together(trainer, engine_of, model_of):
    engines, model = [engine_of("qwen3", 2), engine_of("qwen3", 1)], model_of("qwen3")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    for variant, transport in ((14, "handles"), (15, "group"), (16, "upload")):
        urls = [engine.url for engine in engines]
        trainer("update", urls=urls, version=str(variant), variant=variant, transport=transport)
        for engine in engines:
            check(engine, model, variant)


def test_a_trainer_needs_no_more_memory_than_two_chunks(trainer, serve, tmp_path_factory, monkeypatch):
    import transformers

    wide = transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=16384, head_dim=32, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    monkeypatch.setitem(MODELS, "wide", lambda: wide)
    model = Model("wide", tmp_path_factory.mktemp("wide"))
    engine = serve(model.folder, "--dtype", "bfloat16", "--max-total-tokens", 512, "--skip-tokenizer-init", "--tp", 2)
    trainer("setup", kind=f"@{model.folder}", folder=str(model.folder), mesh=[4])
    bucket, slack, whole = 1 << 21, 8 << 20, 16384 * 1024 * 2
    assert whole > 2 * bucket + slack, "a whole tensor would be noticed"
    for transport in ("handles", "group", "upload"):
        options = dict(urls=[engine.url], version=transport, transport=transport, bucket_bytes=bucket)
        trainer("update", variant=17, **options)
        growth = trainer("measured", **options)
        assert max(growth) < 2 * bucket + slack, f"{transport}: {growth}"
    check(engine, model, 17)
    # Before the engine ends.
    trainer("leave")


def impatient(serve, model):
    return serve(
        model.folder, "--dtype", "bfloat16", "--max-total-tokens", 512, "--skip-tokenizer-init", "--tp", 2,
        "--group-timeout", 4, "--upload-timeout", 4,
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["group", "upload"])
def test_a_rank_that_does_not_come_is_named_and_the_next_update_heals(trainer, serve, model_of, transport):
    model = model_of("qwen3")
    engine = impatient(serve, model)
    client = refit.Client(engine.url)
    codes = dict(group="GROUP_TIMEOUT", upload="DEADLINE")
    options = dict(urls=[engine.url], transport=transport, bucket_bytes=1 << 14)
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("update", version="first", variant=20, **options)
    for chunk in (0, 3):
        trainer("fill", variant=21)
        trainer.begin("fault", only=[3], chunk=chunk, url=engine.url)
        trainer.end(only=[3])
        with pytest.raises(RankFailed) as failed:
            trainer("update", version="second", **options)
        assert set(failed.value.answers) == {0, 1, 2, 3}, "all ranks know"
        assert failed.value.codes[0] == (codes[transport] if chunk == 0 else "WEIGHTS_TORN")
        assert "rank 3" in failed.value.answers[0]["error"]
        assert client.version() == "first"
        if chunk == 0:
            check(engine, model, 20)
        else:
            assert client.weights()["state"] == "torn"
    trainer("update", version="third", variant=22, **options)
    check(engine, model, 22)
    trainer("leave")


def test_all_ranks_know_that_one_could_not_share_its_tensors(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 2), model_of("qwen3")
    options = dict(urls=[engine.url], transport="handles")
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("update", version="before", variant=33, **options)
    trainer("fill", variant=34)
    trainer.begin("no_shared_memory", only=[2])
    trainer.end(only=[2])
    with pytest.raises(RankFailed) as failed:
        trainer("update", version="failed", **options)
    assert set(failed.value.answers) == {0, 1, 2, 3}
    assert all("manager connection has timed out" in answer["error"] for answer in failed.value.answers.values())
    assert refit.Client(engine.url).version() == "before"
    trainer("update", version="after", variant=35, **options)
    check(engine, model, 35)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_midway_ends_the_update_and_another_trainer_heals_it(trainer, serve, model_of, dead):
    model = model_of("qwen3")
    engine = impatient(serve, model)
    client = refit.Client(engine.url)
    options = dict(urls=[engine.url], transport="group", bucket_bytes=1 << 14)
    mortal = Trainer(2)
    try:
        mortal("setup", kind="qwen3", folder=str(model.folder), mesh=[2])
        mortal("update", version="first", variant=30, **options)
        check(engine, model, 30)
        mortal.begin("fault", only=[dead], chunk=2)
        mortal.end(only=[dead])
        with pytest.raises(RankFailed) as failed:
            mortal("update", version="second", **options)
    finally:
        mortal.close()
    assert set(failed.value.answers) == {0, 1}, "the other rank fails too"
    assert client.version() == "first"
    weights = client.weights()
    # The engine names the dead rank, unless the other one has seen its death first and ended the group.
    named = (f"rank {dead} at", "was ended: /destroy_weights_update_group")
    assert weights["state"] == "torn" and any(text in weights["reason"] for text in named[: 1 + dead]), weights
    if dead == 0:
        # Rank 0 would have aborted it.
        left = client.json("GET", "/weight_transactions", admin=True)["open"]["id"]
        client.json("POST", f"/weight_transactions/{left}/abort", {}, admin=True)
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("update", version="third", variant=32, **options)
    check(engine, model, 32)
    trainer("leave")


def test_a_layout_that_its_owner_changes_in_place_is_announced_anew():
    from refit.ranks import Ranks
    from refit.shards import Announcements, Shard

    known, ranks = Announcements(), Ranks()
    layout = dict(boxes=[dict(rank=0, offset=[0, 0], shape=[2, 3])])
    shards = [Shard("w", (4, 3), layout, torch.zeros(2, 3))]
    first, key = known.of(shards, ranks, chunk_bytes=4096)
    assert known.of(shards, ranks, chunk_bytes=4096) == (first, key)
    assert known.of(shards, ranks, chunk_bytes=8192)[1] != key
    assert known.of(shards, ranks, torch.bfloat16, chunk_bytes=4096)[1] != key
    layout["boxes"][0]["offset"][0] = 2
    changed, other = known.of(shards, ranks, chunk_bytes=4096)
    assert other != key and changed["layouts"] == [dict(boxes=[dict(rank=0, offset=[2, 0], shape=[2, 3])])]
    layout["boxes"][0]["offset"][0] = 0
    assert known.of(shards, ranks, chunk_bytes=4096) == (first, key)
    for size in range(20):
        known.of(shards, ranks, chunk_bytes=10000 + size)
    assert len(known.known) == len(known.lists) == Announcements.MOST


def test_a_forgotten_plan_is_announced_again_and_two_trainers_take_turns(trainer, engine_of, model_of):
    engine, model = engine_of("qwen3", 2), model_of("qwen3")
    client = refit.Client(engine.url)
    trainer("setup", kind="qwen3", folder=str(model.folder), mesh=[4])
    trainer("update", urls=[engine.url], version="1", variant=23, transport="kept")
    trainer("forget", urls=[engine.url])
    trainer("update", urls=[engine.url], version="2", variant=24, transport="kept")
    check(engine, model, 24)
    opened = client.json("POST", "/weight_transactions", dict(owner="another trainer"), admin=True)
    with pytest.raises(RankFailed) as failed:
        trainer("update", urls=[engine.url], version="3", variant=25, transport="handles")
    assert set(failed.value.codes.values()) == {"TRANSACTION_OPEN"}
    client.json("POST", f"/weight_transactions/{opened['id']}/abort", {}, admin=True)
    check(engine, model, 24)
    other = engine_of("llama", 1)
    with pytest.raises(RankFailed) as failed:
        trainer("update", urls=[other.url], version="3", transport="handles")
    assert set(failed.value.codes.values()) <= {"WEIGHTS_UNKNOWN_NAME", "WEIGHTS_MISMATCH"}
