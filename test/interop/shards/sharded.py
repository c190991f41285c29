"""A sharded trainer for tests: processes of shard_rank.py that run the same commands."""

import json
import os
import pathlib
import select
import sys
import time

import server
from tensor_process import started

HERE = pathlib.Path(__file__).parent
# Every rank imports these. It has them from the process that it is a fork of, which saves seconds of CPU.
FAMILIES = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe")]
MODULES = ["shard_rank", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", *FAMILIES]


class RankFailed(Exception):
    def __init__(self, answers):
        super().__init__("\n".join(f"rank {rank}: {a.get('trace', a)}" for rank, a in answers.items()))
        self.answers = answers
        self.codes = {rank: answer.get("code") for rank, answer in answers.items()}


class Trainer:
    """Starts one process a rank. A command goes to all of them, and its answers come back by rank.

    `modules`: what they import, too.
    """

    def __init__(self, world=4, modules=()):
        port = server.free_port()
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
        program = str(HERE / "shard_rank.py")
        self.ranks = [
            started(program, sys.__stderr__, dict(env, RANK=str(rank)), [*MODULES, *modules]) for rank in range(world)
        ]
        for rank in range(world):
            assert self.answer(rank) == "ready"

    def begin(self, command, only=None, **fields):
        for rank, process in enumerate(self.ranks):
            if only is None or rank in only:
                process.stdin.write(json.dumps(dict(fields, command=command)).encode() + b"\n")
                process.stdin.flush()

    def answer(self, rank, seconds=90):
        process, deadline = self.ranks[rank], time.monotonic() + seconds
        while not select.select([process.stdout], [], [], 0.2)[0]:
            assert time.monotonic() < deadline, f"rank {rank} gave no answer"
        line = process.stdout.readline()
        return json.loads(line) if line else {"error": "the process has ended"}

    def end(self, only=None):
        answers = {rank: self.answer(rank) for rank in (range(len(self.ranks)) if only is None else only)}
        failed = {rank: answer for rank, answer in answers.items() if "error" in answer}
        if failed:
            raise RankFailed(failed)
        return [answer["value"] for answer in answers.values()]

    def __call__(self, command, **fields):
        self.begin(command, **fields)
        return self.end()

    def close(self):
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait()
