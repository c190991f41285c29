"""A torch server's part in an update from tensors: unpickle the handles, copy into parameters, synchronise.

Started by tensor_bench.py with {"device", "shapes"} on the standard input; prints its port. It uses Python's shortest
HTTP loop, so no time is a framework's. It replies with its own milliseconds, without HTTP.
"""

import base64
import importlib
import json
import pathlib
import pickle
import socket
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "test/gpu"))
# Pickles name its classes, so it is loaded before anything is timed.
importlib.import_module("tensor_payloads")


def named_tensors(sent, load_format):
    if load_format != "flattened_bucket":
        yield from sent
        return
    flat = sent["flattened_tensor"]
    for piece in sent["metadata"]:
        yield piece.name, flat[piece.start_idx : piece.end_idx].view(piece.dtype).view(piece.shape)


def receive(body, parameters, synchronize):
    began = time.perf_counter()
    sent = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    unpickled = time.perf_counter()
    for name, tensor in named_tensors(sent, body.get("load_format")):
        parameters[name].copy_(tensor)
    synchronize()
    copied = time.perf_counter()
    del sent
    ended = time.perf_counter()
    return dict(
        unpickle=1000 * (unpickled - began),
        copy=1000 * (copied - unpickled),
        close=1000 * (ended - copied),
        total=1000 * (ended - began),
    )


def main():
    asked = json.loads(sys.stdin.readline())
    device = torch.device(asked["device"])
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in asked["shapes"]}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = connection.makefile("rb")
    while True:
        length = 0
        line = reader.readline()
        if not line:
            return
        while line.strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
            line = reader.readline()
        reply = json.dumps(receive(json.loads(reader.read(length)), parameters, synchronize)).encode()
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(reply) + reply
        )


if __name__ == "__main__":
    main()
