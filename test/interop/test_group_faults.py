"""Process groups whose trainers die, stop or come late; torch on the other side.

After every fault the server reports an error within the deadline, and answers other requests all the time. Its weights
are old, new or named as torn. The next attempt with the same name and port works at once.
"""

import os
import signal
import time

import pytest

from distributed_group import UPDATE, Watch
from group_outcomes import heals, state_of, words_of
from groups import DEADLINE_S
from server import Refused, settled

# Read by the fixture `party`.
WAITS_S = DEADLINE_S


def stands_still(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    "layout, fault, share",
    [
        ("ta", "SIGKILL", 0.0),
        ("ta", "SIGKILL", 0.3),
        ("ta", "SIGKILL", 0.7),
        ("taab", "SIGKILL", 0.4),
        ("ta", "SIGSTOP", 0.3),
        ("tat", "SIGSTOP", 0.6),
    ],
)
def test_the_sender_is_killed_or_stopped_in_mid_broadcast(party, layout, fault, share):
    kind = "wide"
    group = party.group(kind, layout, name="mid", timeout_s=DEADLINE_S + 5)
    group.join()
    group.update(1).ok()
    party.holds(group, kind, 1)
    names = list(group.shapes)
    # The duration without a fault. It sets the version, because an earlier test may have left another one.
    (usual, *_) = group.update(1, weight_version="usual").ok().trainers
    sender = group.trainers[0]
    group.prepare(2)
    watches = [Watch(server) for server in group.engines.values()]
    for watch in watches:
        watch.__enter__()
    asked = group.announce(names, weight_version="never")
    group.begin_send(share * usual["seconds"], fault)
    replies = {letter: reply.result() for letter, reply in asked.items()}
    # The signal may come after the end of the update, so wait for it.
    if fault == "SIGSTOP":
        assert settled(lambda: stands_still(sender.pid), bool), "the trainer stops itself"
        os.kill(sender.pid, signal.SIGCONT)
    else:
        sender.process.wait()
    group.end_trainers()
    for watch in watches:
        watch.__exit__(None, None, None)
    states = {
        letter: state_of(server, party.checksums(kind, 1), party.checksums(kind, 2))
        for letter, server in group.engines.items()
    }
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


@pytest.mark.parametrize(
    "kind, layout, sent, state", [("qwen3", "ta", 7, "old"), ("qwen3", "taa", 7, "old"), ("wide", "ta", -1, "torn")]
)
def test_the_sender_dies_between_two_broadcasts_of_a_request(party, kind, layout, sent, state):
    """A request in one piece writes nothing.

    With several pieces the first is written, and the others are torn by name.
    """
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


def test_a_sender_that_is_late_is_a_timeout(party):
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
    assert state_of(group.engines["a"], party.checksums(kind, 1), party.checksums(kind, 2)) == "old", (
        "nothing came, so nothing was written"
    )
    # The broken group refuses the next request at once with its first error.
    with pytest.raises(Refused) as refused:
        group.engines["a"].post(UPDATE, group.body(list(group.shapes), "each", {}))
    assert (
        "/init_weights_update_group" in refused.value.body and "Nothing has been received since" in refused.value.body
    )
    group.trainers[0]("leave", group="late")
    heals(party, kind, "taa", "late", group.port, 2)
