"""The native gloo transport against torch's: equal bytes in each of torch's ways to connect, and clear errors."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from conftest import ROOT
from gloo_torch import data
from server import settled
from tensor_process import started

ADDON = os.environ.get("REFIT_NATIVE", str(next((ROOT / "prebuilds").glob("*/refit.node"))))
MS = 120_000


class Process:
    def __init__(self, process):
        self.process = process

    def tell(self, command, **options):
        self.process.stdin.write(json.dumps({"command": command, **options}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "it has ended"}

    def ask(self, command, **options):
        self.tell(command, **options)
        return self.hear()

    def kill(self):
        self.process.kill()
        self.process.wait()


def torch_rank(**env):
    program = str(ROOT / "test/interop/gloo_torch.py")
    return Process(started(program, sys.__stderr__, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}))


def native_rank():
    command = ["node", str(ROOT / "test/interop/gloo_rank.js"), ADDON]
    return Process(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


class Meeting:
    """Reused processes, their rendezvous store and their groups."""

    def __init__(self):
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
        )
        self.kinds, self.groups = {}, 0

    def torches(self, count, **env):
        kept = self.kinds.setdefault(tuple(env.items()), [])
        kept[:] = [process for process in kept if process.process.poll() is None]
        while len(kept) < count:
            kept.append(torch_rank(**env))
        return kept[:count]

    def natives(self, count):
        kept = self.kinds.setdefault("native", [])
        while len(kept) < count:
            kept.append(native_rank())
        return kept[:count]

    def join(self, members):
        """`members`: pairs of a process and its ranks. Returns the errors."""
        self.groups += 1
        name, size = f"g{self.groups}", sum(len(ranks) for _, ranks in members)
        keys = dist.PrefixStore("0", dist.PrefixStore(name, self.store))
        natives = [(process, ranks) for process, ranks in members if process in self.kinds.get("native", [])]
        others = [(process, ranks) for process, ranks in members if (process, ranks) not in natives]
        for process, [rank] in others:
            process.tell("join", port=self.store.port, name=name, rank=rank, size=size)
        for process, ranks in natives:
            made = process.ask("group", size=size, ranks=ranks, host="127.0.0.1")
            for rank, address in zip(ranks, made["addresses"]):
                keys.set(str(rank), base64.b64decode(address))
        peers = [base64.b64encode(keys.get(str(rank))).decode() for rank in range(size)]
        for process, _ in natives:
            process.tell("connect", peers=peers, ms=MS)
        answers = [process.hear() for process, _ in natives + others]
        return [answer for answer in answers if answer]


@pytest.fixture(scope="module")
def meeting():
    made = Meeting()
    yield made
    for processes in made.kinds.values():
        for process in processes:
            process.kill()


def sums(seed, parts):
    return [hashlib.sha256(data(seed + i, count).tobytes()).hexdigest() for i, count in enumerate(parts)]


def slots(parts):
    """The places of the parts in a slot, and its size: one after another, at even offsets, with gaps."""
    flat, at = [], 0
    for count in parts:
        flat += [at, count]
        at += (count + 1) // 2 * 2 + 42
    return flat, at


def exchange(members, natives, root, seed, parts, at_once=False):
    """Broadcasts each part from `root`. Every rank must receive its bytes."""
    flat, _ = slots(parts)
    owner = next(process for process, ranks in members if root in ranks)
    for process, _ in members:
        if process not in natives:
            process.tell("broadcast", root=root, seed=seed, parts=parts, at_once=at_once)
        elif process is not owner:
            process.tell("receive", slot=seed % 2, parts=flat, root=root, ms=MS)
    if owner in natives:
        for i, count in enumerate(parts):
            assert owner.ask("send", bytes=base64.b64encode(data(seed + i, count)).decode(), ms=MS) == {}
    for process, _ in members:
        if process is owner and process in natives:
            continue
        answer = process.hear()
        assert "error" not in answer, answer
        if process in natives:
            answer = process.ask("sums", slot=seed % 2, parts=flat)
        assert answer == {"sums": sums(seed, parts)}


def barrier(members, natives):
    for process, _ in members:
        process.tell("barrier", **({"ms": MS} if process in natives else {}))
    assert [process.hear() for process, _ in members] == [{} for _ in members]


def leave(members, natives):
    for process, _ in members:
        assert (
            process.ask(
                *(["end"] if process in natives else ["leave"]), **({"abort": False} if process in natives else {})
            )
            == {}
        )


@pytest.mark.parametrize(
    "env",
    [{}, {"TORCH_GLOO_LAZY_INIT": "1"}, {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}],
    ids=["default", "lazy", "ranks"],
)
@pytest.mark.parametrize(
    "torches, natives",
    [([[0]], [[1]]), ([[1]], [[0]]), ([[0]], [[1, 2, 3, 4]]), ([[0], [3]], [[1], [2, 4]]), ([[1], [2]], [[0]])],
    ids=["2", "2-ours-first", "5-one-process", "5-four-processes", "3"],
)
def test_every_rank_of_any_world_has_the_roots_bytes(meeting, torches, natives, env):
    nodes = meeting.natives(len(natives))
    members = list(zip(meeting.torches(len(torches), **env), torches)) + list(zip(nodes, natives))
    assert meeting.join(members) == []
    for node in nodes:
        assert node.ask("stage", bytes=8 << 20) == {}
    # A native process sends from its first rank.
    roots = [ranks[0] for _, ranks in members]
    for turn, root in enumerate(roots * 2):
        exchange(members, nodes, root, 100 * turn, [1000, 0, 1, 48, 100003], at_once=turn % 2 == 1)
        if turn % 2 == 0:
            barrier(members, nodes)
    exchange(members, nodes, roots[0], 7, [3 << 20, 2 << 20])
    leave(members, nodes)


def test_hundreds_of_small_broadcasts_at_once_arrive_at_their_offsets(meeting):
    [torch], [node] = meeting.torches(1), meeting.natives(1)
    members = [(torch, [0]), (node, [1])]
    assert meeting.join(members) == []
    parts = [(i * 37) % 3001 for i in range(300)]
    assert node.ask("stage", bytes=slots(parts)[1]) == {}
    for at_once in (True, False):
        exchange(members, [node], 0, 4, parts, at_once)
    leave(members, [node])


def connected(meeting, size=4 << 20):
    [torch], [node] = meeting.torches(1), meeting.natives(1)
    assert meeting.join([(torch, [0]), (node, [1])]) == []
    assert node.ask("stage", bytes=size) == {}
    return torch, node


@pytest.mark.parametrize(
    "act, words",
    [
        (dict(command="broadcast", root=0, seed=1, parts=[999]), "sends 999 bytes in broadcast 0, expected 1000"),
        (dict(command="broadcast", root=1, seed=1, parts=[1000]), "do the two sides name the same root?"),
        (dict(command="barrier"), "is in barrier 0 where this side is in broadcast 0"),
        (dict(command="allreduce"), "is in allreduce 0 where this side is in broadcast 0"),
    ],
    ids=["length", "root", "barrier", "allreduce"],
)
def test_a_trainer_that_runs_another_collective_gets_an_error_and_does_not_wait(meeting, act, words):
    torch, node = connected(meeting)
    torch.tell(**act)
    answer = node.ask("receive", slot=0, parts=[0, 1000], root=0, ms=MS)
    assert (
        answer["code"] == "GROUP_BROKEN" and words in answer["error"] and "rank 0 at 127.0.0.1:" in answer["error"]
    ), answer
    # The trainer's wait ends long before its own timeout. Too few or too many bytes are received before they are
    # refused.
    assert ("error" in torch.hear()) == (not act.get("parts") == [999])
    assert node.ask("end", abort=False) == {}
    assert torch.ask("leave") == {}


@pytest.mark.parametrize(
    "how, ms, code", [("SIGKILL", MS, "GROUP_BROKEN"), ("SIGSTOP", 1500, "GROUP_TIMEOUT")], ids=["killed", "stopped"]
)
def test_a_trainer_that_dies_or_stops_in_a_broadcast_is_reported_in_time(meeting, how, ms, code):
    torch, node = connected(meeting, 512 << 20)
    assert node.ask("left")["threads"] > 0
    node.tell("receive", slot=0, parts=[0, 512 << 20], root=0, ms=ms)
    torch.tell("broadcast", root=0, seed=None, parts=[512 << 20], end=how)
    answer = node.hear()
    assert answer["code"] == code, answer
    assert (
        "rank 0 at 127.0.0.1:" in answer["error"]
        and "of 536870912 bytes of broadcast 0 (part 1 of 1) had come" in answer["error"]
    )
    torch.kill()
    assert node.ask("end", abort=True) == {}


def test_an_abort_ends_a_receive_at_once_on_both_sides(meeting):
    torch, node = connected(meeting)
    answer = node.ask("aborted", reason="the operator wished it", ms=MS)
    assert answer["code"] == "GROUP_BROKEN" and "the operator wished it" in answer["error"]
    assert "error" in torch.ask("broadcast", root=0, seed=1, parts=[1000])
    assert node.ask("end", abort=False) == {}
    assert torch.ask("leave") == {}


def test_groups_that_are_made_and_ended_leak_nothing(meeting, pytestconfig):
    [node] = meeting.natives(1)
    before = None
    for turn in range(pytestconfig.getoption("--rounds") + 2):
        torch, node = connected(meeting)
        exchange([(torch, [0]), (node, [1])], [node], 0, turn, [1000, 3])
        leave([(torch, [0]), (node, [1])], [node])
        if turn == 1:
            before = node.ask("left")
    # The system counts a thread for a moment after its join.
    left = settled(lambda: node.ask("left"), lambda left: all(left[what] <= before[what] for what in before))
    assert all(left[what] <= before[what] for what in before), f"{before} before, {left} after"
