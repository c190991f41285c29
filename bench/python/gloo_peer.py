"""A torch process in groups of gloo: the trainer that broadcasts a checkpoint, or a receiver made of torch, to compare
with.

usage: gloo_peer.py CHECKPOINT.safetensors THREADS. Lines of JSON on the standard input, a line of JSON for each: {"do":
"join", "group", "port", "rank", "world"}; {"do": "broadcast", "group", "way": "each" or "bucket"}; {"do": "leave",
"group"}. The first line out are names and shapes, in the order of the broadcasts.
"""

import gc
import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/trainers"))
from process_group import broadcast, init_custom_process_group  # noqa: E402


def main():
    torch.set_num_threads(int(sys.argv[2]))
    named = load_file(sys.argv[1])
    flat = torch.cat([tensor.flatten() for tensor in named.values()])
    groups, ranks = {}, {}

    def join(group, port, rank, world):
        groups[group] = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world, rank, group)
        ranks[group] = rank

    def send(group, way):
        tensors = [flat] if way == "bucket" else list(named.values())
        for work in [broadcast(tensor, groups[group], async_op=True) for tensor in tensors]:
            work.wait()

    def leave(group):
        dist.destroy_process_group(groups.pop(group))
        gc.collect()

    words = dict(join=join, broadcast=send, leave=leave)
    print(
        json.dumps(
            dict(
                torch=torch.__version__,
                tensors=[dict(name=name, shape=list(tensor.shape)) for name, tensor in named.items()],
            )
        ),
        flush=True,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        words[asked.pop("do")](**asked)
        print(json.dumps(dict(ms=1000 * (time.perf_counter() - began))), flush=True)


if __name__ == "__main__":
    main()
