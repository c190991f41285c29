"""Process groups whose trainers never join, leave silently, or send other bytes than announced; torch on the other
side.

The same must hold afterwards as in test_group_faults.py.
"""

import time

import pytest

from distributed_group import INIT, UPDATE, Watch, free_port
from group_outcomes import heals, state_of, words_of
from groups import DEADLINE_S, footprint
from leaks import grown
from server import Refused
from tensor_process import SenderFailed

# Read by the fixture `party`.
WAITS_S = DEADLINE_S


def test_a_trainer_that_never_joins_is_a_timeout(party):
    # Nobody comes in any of the rounds, so a short wait ends as a long one does.
    hasty = "--group-timeout", 4
    group = party.group("qwen3", "ta", *hasty, name="never")
    server = group.engines["a"]
    # The first round starts what a server starts once.
    for attempt in range(3):
        if attempt == 1:
            before = footprint(server.process.pid)
        with Watch(server):
            with pytest.raises(Refused) as refused:
                server.post(INIT, group.place("a"))
        words_of(refused.value, "never", str(group.port))
    more = grown(lambda: footprint(server.process.pid), (before[0] + 1, before[1]))
    assert not more, f"descriptors or threads, allowed and found: {more}"
    heals(party, "qwen3", "ta", "never", group.port, 1, *hasty)


def test_another_rank_that_never_joins_is_a_timeout(party):
    """The trainer has joined; another rank of the group has not."""
    group = party.group("qwen3", "tat", name="third")
    absent = group.trainers.pop()
    arguments = dict(
        group="third", address=group.address, port=group.port, world=3, backend="gloo", timeout_s=DEADLINE_S
    )
    group.begin_trainers("join", **arguments)
    asked = group.post(INIT, {"a": group.place("a")})
    reply = asked["a"].result()
    if not isinstance(reply, Exception):
        with pytest.raises(Refused) as refused:
            group.engines["a"].post(UPDATE, group.body(list(group.shapes), "each", {}))
        reply = refused.value
    words_of(reply, "third")
    (joined,) = group.end_trainers()
    assert isinstance(joined, SenderFailed), "torch itself gives up"
    assert absent.usable
    heals(party, "qwen3", "tat", "third", free_port(), 1)


def test_another_name_than_the_trainer_s_ends_the_wait_of_both(party):
    """Both would wait for minutes, each in its own part of the store."""
    patient = "--group-timeout", 600
    group = party.group("qwen3", "ta", *patient, name="theirs", timeout_s=600)
    arguments = dict(group="theirs", address=group.address, port=group.port, world=2, backend="gloo", timeout_s=600)
    group.begin_trainers("join", **arguments)
    with Watch(group.engines["a"]), pytest.raises(Refused) as refused:
        group.engines["a"].post(INIT, group.place("a") | dict(group_name="ours"), timeout=300)
        # A trainer that is slow to publish its address: the refusal comes with the next request.
        group.engines["a"].post(UPDATE, group.body(list(group.shapes), "each", {}) | dict(group_name="ours"))
    assert refused.value.status == 400
    words_of(refused.value, '"ours"', "rank 0 of 2", 'a group "theirs"', "group_name must be the same")
    # The engine connects and leaves. torch's gloo sees that while it joins, or at its first broadcast if it was faster.
    (ended,) = group.end_trainers()
    if not isinstance(ended, Exception):
        group.prepare(1)
        group.begin_send()
        (ended,) = group.end_trainers()
    assert isinstance(ended, SenderFailed), ended
    assert "gloo" in str(ended), ended
    heals(party, "qwen3", "ta", "theirs", free_port(), 1, *patient)


LIES = {
    "fewer bytes than announced": dict(instead=-1),
    "more bytes than announced": dict(instead=1),
    "a tensor less than announced": dict(cut=1),
    "a bucket instead of tensors": dict(way="bucket"),
    "another order": dict(turned=True),
}


@pytest.mark.parametrize("lie", LIES)
def test_other_bytes_than_announced(party, lie):
    """gloo reveals different sizes. Tensors whose error comes after the first write are named as torn."""
    kind = "qwen3"
    group = party.group(kind, "taa", name="lies", timeout_s=2 * DEADLINE_S)
    group.join()
    group.update(1).ok()
    names = list(group.shapes)
    told = dict(LIES[lie])
    odd = next(name for name in names if name.endswith("gate_proj.weight"))
    sent = {}
    if "instead" in told:
        sent["instead"] = {odd: [group.shapes[odd][0] + told["instead"], group.shapes[odd][1]]}
    if "cut" in told:
        sent["names"] = names[:-1]
    if "way" in told:
        sent["way"] = told["way"]
    if "turned" in told:
        sent["names"] = names[::-1]
    group.prepare(2, **sent)
    with Watch(group.engines["a"]):
        asked = group.announce(names)
        group.begin_send()
        refusal = asked["a"].result()
        group.end_trainers()
    message = words_of(refusal, "lies")
    if "instead" in told:
        assert odd in message, message
    print(f"{lie}: {message}")
    state_of(group.engines["a"], party.checksums(kind, 1), party.checksums(kind, 2))
    group.trainers[0]("leave", group="lies")
    heals(party, kind, "taa", "lies", group.port, 2)


def test_a_trainer_that_left_silently_joins_again_after_a_destroy(party):
    """Without a destroy, an init with other parameters is refused with a clear error. A destroy and an init cure it."""
    group = party.group("qwen3", "ta", name="gone")
    group.join()
    group.update(1).ok()
    group.trainers[0]("leave", group="gone")
    time.sleep(0.5)
    with pytest.raises(Refused) as refused:
        group.engines["a"].post(UPDATE, group.body(list(group.shapes), "each", {}))
    words_of(refused.value, "gone")
    group.post("/destroy_weights_update_group", {"a": dict(group_name="gone")})["a"].result()
    heals(party, "qwen3", "ta", "gone", group.port, 2)


def test_destroy_ends_a_waiting_update(party):
    # A server with a long deadline, so that the destroy ends the wait and not the deadline.
    patient = "--group-timeout", 600
    group = party.group("qwen3", "ta", *patient, name="ended")
    group.join()
    asked = group.announce(list(group.shapes))
    time.sleep(0.3)
    reply = group.post("/destroy_weights_update_group", {"a": dict(group_name="ended")})["a"].result()
    assert not isinstance(reply, Exception)
    assert isinstance(asked["a"].result(), Refused)
    group.trainers[0]("leave", group="ended")
    heals(party, "qwen3", "ta", "ended", group.port, 1, *patient)


def test_a_server_with_a_group_ends_cleanly(party):
    group = party.group("qwen3", "ta", "--served-model-name", "ending", name="ending")
    group.join()
    asked = group.announce(list(group.shapes))
    time.sleep(0.3)
    server = group.engines["a"]
    server.stop()
    assert isinstance(asked["a"].result(), Exception)
    party.servers = {key: one for key, one in party.servers.items() if one is not server}
    group.trainers[0].kill()
