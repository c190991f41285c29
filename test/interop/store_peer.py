"""torch's TCPStore, one call a line.

In: {"call": name, "args": [...]}. Out: {"value": ...} or {"error": ...}. Bytes are {"hex": ...}.
"""

import datetime
import json
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
stores = {}
groups = []


def plain(value):
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def native(value):
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [native(one) for one in value] if isinstance(value, list) else value


def open_store(name, port, world_size, is_master, use_libuv, timeout=20):
    # Without a world size the store does not count its clients.
    stores[name] = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master,
        timeout=datetime.timedelta(seconds=timeout),
        use_libuv=use_libuv,
        wait_for_workers=world_size is not None,
    )
    return stores[name].port


def rendezvous(name, url, rank, world_size, timeout=20):
    stores[name] = next(dist.rendezvous(url, rank, world_size, timeout=datetime.timedelta(seconds=timeout)))[0]


def prefix(name, of, text):
    stores[name] = dist.PrefixStore(text, stores[of])


def store(name, method, *args):
    return getattr(stores[name], method)(*args)


def wait(name, keys, seconds):
    stores[name].wait(keys, datetime.timedelta(seconds=seconds))


def gloo_group(group, url, rank, world_size, timeout=20):
    """init_custom_process_group as trainers define it, with gloo. A test reads the keys that it writes.

    The store outlives a refused group: the other ranks may still read from it.
    """
    limit = datetime.timedelta(seconds=timeout)
    parent = dist.PrefixStore(group, next(dist.rendezvous(url, rank, world_size, timeout=limit))[0])
    groups.append(parent)
    made, _ = dist.distributed_c10d._new_process_group_helper(
        world_size, rank, [], "gloo", parent, group_name=group, timeout=limit
    )
    groups.append(made)


CALLS = {function.__name__: function for function in (open_store, rendezvous, prefix, store, wait, gloo_group)}
for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"value": plain(CALLS[request["call"]](*native(request["args"])))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
