"""torchrun in a fork of a process that has imported torch, and its workers as forks, too."""

import ctypes
import json
import os
import pathlib
import sys
import threading

from tensor_process import started

ENDED_WELL = "torchrun has ended well"
# transformers loads tensors on several threads, and after a fork torch may fail when two begin at once.
ENV = dict(HF_DEACTIVATE_ASYNC_LOAD="1", OMP_NUM_THREADS="1")


def torchrun(program, processes, arguments, modules, log, **env):
    """Runs a program to its end in so many processes, and returns their output. `modules`: what it imports, from its
    folder, too. `log`: the file for errors."""
    options = ["--standalone", "--nproc-per-node", processes, program, *arguments]
    env = dict(ENV, **env, PYTHONPATH=str(pathlib.Path(program).parent))
    with open(log, "w") as errors:
        run = started(__file__, errors, env, ["torch.distributed.run", "torch.distributed.fsdp", *modules])
    limit = threading.Timer(900, run.kill)
    limit.start()
    run.stdin.write(json.dumps(list(map(str, options))).encode() + b"\n")
    run.stdin.close()
    output = run.stdout.read().decode()
    limit.cancel()
    assert ENDED_WELL in output, output[-2000:] + pathlib.Path(log).read_text()[-8000:]
    return output


def fork_the_fork_server():
    """Starts multiprocessing's fork server as a fork of this process, which has one thread.

    torchrun has threads when it starts its workers. A fork of it would inherit their locks and wait for ever."""
    from multiprocessing import forkserver, resource_tracker, util

    def fork(_, arguments, descriptors):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, 9)
            exec(arguments[-1], {})
            os._exit(0)
        return pid

    assert len(os.listdir("/proc/self/task")) == 1
    resource_tracker.ensure_running()
    real, util.spawnv_passfds = util.spawnv_passfds, fork
    forkserver.ensure_running()
    util.spawnv_passfds = real


if __name__ == "__main__":
    from torch.distributed import run

    fork_the_fork_server()
    run.main(["--run-path", "--start-method", "forkserver", *json.loads(sys.stdin.readline())])
    print(ENDED_WELL, flush=True)
