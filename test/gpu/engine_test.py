"""The whole server on a GPU: numerics against transformers, updates, memory, faults.

usage: engine_test.py [--device cuda|cpu] [--only WORD]... [--small] [--whole] [--folder DIR] [--seed N] [--within
SECONDS] [--report FILE] [--list]

--only keeps the tests whose name contains the word; --small leaves out real sizes, --whole adds the largest (61 GB).
Checkpoints go to DIR, else to /dev/shm if they fit, else to the temporary folder. On a CPU it runs the tests that need
no GPU. Needs torch, transformers, safetensors.
"""

import argparse
import importlib
import sys

import harness

# Each module registers its tests, which run in this order.
for name in [
    "numerics",
    "routed",
    "deterministic",
    "updates",
    "shadow",
    "adapters",
    "robust",
    "no_peers",
    "tensor_ways",
    "tensor_life",
    "tensor_refused",
    "tensor_kept",
    "tensor_real",
    "tensor_examples",
    "distributed_ways",
    "distributed_life",
    "distributed_examples",
    "shards_ways",
    "fleet",
    "data_parallel",
]:
    importlib.import_module(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=float("inf"))
    parser.add_argument("--report")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, *_ in harness.TESTS))
        return
    import torch

    if options.device == "cuda" and torch.cuda.device_count() == 0:
        sys.exit("torch sees no card: is the driver there, and is this a torch with CUDA?")
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows = harness.run(options)
    print()
    for name, outcome, seconds, note in rows:
        print(f"{outcome:8} {seconds:6.1f} s  {name}{': ' + note if note else ''}")
    count = {word: sum(row[1] == word for row in rows) for word in ("passed", "failed", "skipped")}
    print(", ".join(f"{number} {word}" for word, number in count.items()))
    sys.exit(0 if count["failed"] == 0 and count["passed"] > 0 else 1)


if __name__ == "__main__":
    main()
