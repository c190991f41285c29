"""`refit serve --dp`: torch's trainers update all engines by one request, and each engine holds every bit."""

import pytest

from distributed_group import Group
from server import Refused, settled
from tensors import post, serialize, update

KIND = "qwen3"
SIZE = 2


@pytest.fixture(scope="module")
def replicas(party):
    return party.server(KIND, 1, "a", "--dp", SIZE)


def ask(server, rank, tokens=1):
    params = dict(max_new_tokens=tokens, temperature=0)
    body = dict(input_ids=[5, 6], sampling_params=params, routed_dp_rank=rank)
    return post(server, "/generate", body)["meta_info"]


def holds(server, party, variant):
    """Each engine, not only the merged reply. An engine that was torn joins again a moment after it was healed."""
    states = settled(
        lambda: [worker["state"] for worker in server.get("/workers")["workers"]],
        lambda states: states == ["ready"] * SIZE,
    )
    assert states == ["ready"] * SIZE
    replies = server.post("/weights_checker", dict(action="checksum"))["engines"]
    assert len(replies) == SIZE
    for reply in replies.values():
        assert reply["checksums"] == party.checksums(KIND, variant)
    assert server.get("/engine_metrics").count("refit:weights_torn{") == SIZE


# As from a trainer that knows of one rank, and from one that counts tp_size.
@pytest.mark.parametrize("entries", [1, SIZE])
@pytest.mark.usefixtures("nothing_left")
def test_every_engine_opens_the_handles(replicas, party, entries):
    model = party.model(KIND)
    replicas.post("/weights_checker", dict(action="reset_tensors"))
    for step, variant in enumerate([1, 2, 1]):
        tensors = [(name, tensor.clone()) for name, tensor in model.tensors(variant)]
        # Equal texts have one reference together, so the first engine that has read would free them for the other.
        payloads = [serialize(tensors) for _ in range(entries)]
        del tensors
        update(replicas, payloads, weight_version=f"{entries}-{step}")
        holds(replicas, party, variant)
        assert {ask(replicas, rank)["weight_version"] for rank in range(SIZE)} == {f"{entries}-{step}"}


def test_the_ranks_of_a_group_are_numbered_engine_by_engine(replicas, party):
    assert replicas.get("/server_info")["tp_size"] == replicas.get("/get_world_size")["world_size"] == SIZE
    group = Group("taa", {"a": replicas}, party.trainers_for(KIND, 1), party.model(KIND).shapes)
    group.join().ok()
    replicas.post("/weights_checker", dict(action="reset_tensors"))
    for variant, way in [(1, "each"), (2, "bucket"), (1, "one-by-one")]:
        group.update(variant, way=way, weight_version=f"group-{variant}").ok()
        holds(replicas, party, variant)
        assert [ask(replicas, rank)["weight_version"] for rank in range(SIZE)] == [f"group-{variant}"] * SIZE
    group.leave()


def test_a_group_without_room_for_every_engine_is_refused(replicas, party):
    group = Group("ta", {"a": replicas}, party.trainers_for(KIND, 1), party.model(KIND).shapes)
    with pytest.raises(Refused, match="has no room for"):
        replicas.post("/init_weights_update_group", group.place("a"))

