"""A sharded trainer for tests: processes of shard_rank.py that run the same commands."""

import json
import os
import pathlib
import select
import subprocess
import sys
import time

import server

HERE = pathlib.Path(__file__).parent


class RankFailed(Exception):
    def __init__(self, answers):
        super().__init__("\n".join(f"rank {rank}: {a.get('trace', a)}" for rank, a in answers.items()))
        self.answers = answers
        self.codes = {rank: answer.get("code") for rank, answer in answers.items()}


class Trainer:
    """Starts one process a rank. A command goes to all of them, and its answers come back by rank."""

    def __init__(self, world=4):
        port = server.free_port()
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
        env["OMP_NUM_THREADS"] = "1"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "shard_rank.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(env, RANK=str(rank)),
            )
            for rank in range(world)
        ]
        for rank in range(world):
            assert self.answer(rank) == "ready"

    def begin(self, command, only=None, **fields):
        for rank, process in enumerate(self.ranks):
            if only is None or rank in only:
                process.stdin.write(json.dumps(dict(fields, command=command)) + "\n")
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
