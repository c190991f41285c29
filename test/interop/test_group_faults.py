"""Process groups whose trainers die, stop, come late, never come, or send something else than they say; torch on the other side.

After every fault: an error in words within the deadline, weights that are old, new or named as torn, a server that answers all along,
and the next attempt under the same name and port works at once.
"""

import json
import os
import re
import signal
import time

import pytest

from distributed_group import INIT, UPDATE, Watch, free_port
from groups import DEADLINE_S, footprint
from leaks import grown
from server import Refused, settled
from tensor_process import SenderFailed

WAITS_S = DEADLINE_S


def state_of(server, old, new):
    """What the weights are, in a word. `old`, `new`: {name: checksum}. Anything unnamed that is neither fails."""
    got = server.checksums()
    health = server.get("/health")
    if server.metric("refit:weights_torn") == 0:
        assert got in (old, new), "weights that are neither old nor new, and not called torn"
        return "old" if got == old else "new"
    with pytest.raises(Refused) as refused:
        server.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert refused.value.status == 503
    torn = health["weights"]["tensors"]
    assert torn and len(torn) <= health["weights"]["torn_count"]
    if len(torn) == health["weights"]["torn_count"]:
        mixed = [name for name in old if name not in torn and got.get(name) not in (old[name], new[name])]
        assert not mixed, f"neither old nor new, and not called torn: {mixed[:5]}"
    return "torn"


def words_of(refusal, *expected):
    """The refusal says how long it took, and everything that is expected of it."""
    assert isinstance(refusal, Refused), refusal
    message = json.loads(refusal.body)["message"]
    assert re.search(r"\d+(\.\d+)? ?(ms|s)\b", message), f"no elapsed time in: {message}"
    for word in expected:
        assert word in message, f"{word} is not in: {message}"
    return message


def stands_still(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def heals(party, kind, layout, name, port, variant, *flags):
    """The next attempt, with the same name and port."""
    group = party.group(kind, layout, *flags, name=name, port=port)
    group.join()
    group.update(variant).ok()
    party.holds(group, kind, variant)
    group.leave()
    group.close()


@pytest.mark.parametrize(
    "layout, fault, share",
    [("ta", "SIGKILL", 0.0), ("ta", "SIGKILL", 0.3), ("ta", "SIGKILL", 0.7), ("taab", "SIGKILL", 0.4), ("ta", "SIGSTOP", 0.3), ("tat", "SIGSTOP", 0.6)],
)
def test_the_sender_is_killed_or_stopped_in_mid_broadcast(party, layout, fault, share):
    kind = "wide"
    group = party.group(kind, layout, name="mid", timeout_s=DEADLINE_S + 5)
    group.join()
    group.update(1).ok()
    party.holds(group, kind, 1)
    names = list(group.shapes)
    # How long it takes when nothing happens. It names the version: a test before this one may have left its own.
    (usual, *_) = group.update(1, weight_version="usual").ok().trainers
    sender = group.trainers[0]
    group.prepare(2)
    watches = [Watch(server) for server in group.engines.values()]
    for watch in watches:
        watch.__enter__()
    asked = group.announce(names, weight_version="never")
    group.begin_send(share * usual["seconds"], fault)
    replies = {letter: reply.result() for letter, reply in asked.items()}
    # It may have been too late for the update, and is still to come.
    if fault == "SIGSTOP":
        assert settled(lambda: stands_still(sender.pid), bool), "the trainer stops itself"
        os.kill(sender.pid, signal.SIGCONT)
    else:
        sender.process.wait()
    group.end_trainers()
    for watch in watches:
        watch.__exit__(None, None, None)
    states = {letter: state_of(server, party.checksums(kind, 1), party.checksums(kind, 2)) for letter, server in group.engines.items()}
    for letter, reply in replies.items():
        if isinstance(reply, Exception):
            words_of(reply, "mid")
            assert states[letter] != "new"
            assert group.engines[letter].get("/get_weight_version")["weight_version"] == "usual"
        else:
            assert states[letter] == "new", "the fault came too late, and it said 200"
    print(f"{layout} {fault} at {share}: {states}, {[str(reply)[:300] for reply in replies.values()]}")
    if fault == "SIGSTOP":
        for process in group.trainers:
            if process.usable:
                process("leave", group="mid")
    else:
        for process in group.trainers[1:]:
            process.kill()
    heals(party, kind, layout, "mid", group.port, 1)


@pytest.mark.parametrize("kind, layout, sent, state", [("qwen3", "ta", 7, "old"), ("qwen3", "taa", 7, "old"), ("wide", "ta", -1, "torn")])
def test_the_sender_dies_between_two_broadcasts_of_a_request(party, kind, layout, sent, state):
    """Of what fits in one piece nothing is written; of what takes several the first has been written, and the others are named."""
    group = party.group(kind, layout, name="between")
    group.join()
    group.update(1, weight_version="usual").ok()
    names = list(group.shapes)
    group.prepare(2, names[:sent])
    asked = group.announce(names, weight_version="never")
    group.begin_send()
    group.end_trainers()
    group.trainers[0].kill()
    refusal = asked["a"].result()
    words_of(refusal, "between", names[sent])
    server = group.engines["a"]
    assert state_of(server, party.checksums(kind, 1), party.checksums(kind, 2)) == state
    if state == "torn":
        torn = server.get("/health")["weights"]["tensors"]
        assert names[-1] in torn and names[0] not in torn
        assert server.checksums()[names[0]] == party.checksums(kind, 2)[names[0]]
    assert server.get("/get_weight_version")["weight_version"] == "usual"
    heals(party, kind, layout, "between", group.port, 2)


def test_a_sender_that_comes_too_late(party):
    kind = "qwen3"
    group = party.group(kind, "taa", name="late")
    group.join()
    group.update(1).ok()
    began = time.monotonic()
    with Watch(group.engines["a"]):
        asked = group.announce(list(group.shapes))
        refusal = asked["a"].result()
    assert time.monotonic() - began > DEADLINE_S - 1
    assert words_of(refusal, "late") and refusal.status == 504
    assert state_of(group.engines["a"], party.checksums(kind, 1), party.checksums(kind, 2)) == "old", "nothing came, so nothing was written"
    # The group is of no use after it, and says so by what it failed with, without another wait.
    with pytest.raises(Refused) as refused:
        group.engines["a"].post(UPDATE, group.body(list(group.shapes), "each", {}))
    assert "/init_weights_update_group" in refused.value.body and "Nothing has been received since" in refused.value.body
    group.trainers[0]("leave", group="late")
    heals(party, kind, "taa", "late", group.port, 2)


def test_a_trainer_that_never_comes(party):
    group = party.group("qwen3", "ta", name="never")
    server = group.engines["a"]
    before = footprint(server.process.pid)
    for _ in range(2):
        with Watch(server):
            with pytest.raises(Refused) as refused:
                server.post(INIT, group.place("a"))
        words_of(refused.value, "never", str(group.port))
    more = grown(lambda: footprint(server.process.pid), (before[0] + 1, before[1]))
    assert not more, f"descriptors or threads, allowed and found: {more}"
    heals(party, "qwen3", "ta", "never", group.port, 1)


def test_a_third_party_that_never_comes(party):
    """The trainer is there, another rank of the group is not."""
    group = party.group("qwen3", "tat", name="third")
    absent = group.trainers.pop()
    arguments = dict(group="third", address=group.address, port=group.port, world=3, backend="gloo", timeout_s=DEADLINE_S)
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


LIES = {
    "fewer bytes than announced": dict(instead=-1),
    "more bytes than announced": dict(instead=1),
    "a tensor less than announced": dict(cut=1),
    "a bucket instead of tensors": dict(way="bucket"),
    "another order": dict(turned=True),
}


@pytest.mark.parametrize("lie", LIES)
def test_other_bytes_than_announced(party, lie):
    """Sizes that differ are noticed where gloo tells them; whatever is noticed late is named as torn."""
    kind = "qwen3"
    group = party.group(kind, "taa", name="lies", timeout_s=3 * DEADLINE_S)
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


def test_the_trainer_leaves_and_comes_again_without_a_word(party):
    """No destroy is sent: init with other parameters, while the old group's peers are gone, is answered in words; destroy and init cure it."""
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


def test_destroy_ends_what_waits(party):
    # A server that waits for long: what ends is not ended by its deadline.
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


def test_a_server_that_is_ended_with_a_group_ends_cleanly(party):
    group = party.group("qwen3", "ta", "--served-model-name", "ending", name="ending")
    group.join()
    asked = group.announce(list(group.shapes))
    time.sleep(0.3)
    server = group.engines["a"]
    server.stop()
    assert isinstance(asked["a"].result(), Exception)
    party.servers = {key: one for key, one in party.servers.items() if one is not server}
    group.trainers[0].kill()
