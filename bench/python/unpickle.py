"""The alternative to the decoder: CPython's own unpickler (C), with every name standing for nothing, on the same bytes.
Reads base64 from standard input, prints milliseconds."""

import base64
import io
import json
import pickle
import sys
import time


class Inert(pickle.Unpickler):
    def find_class(self, module, name):
        return lambda *args: args


data = base64.b64decode(sys.stdin.read())
times = []
for _ in range(9):
    start = time.perf_counter()
    Inert(io.BytesIO(data)).load()
    times.append((time.perf_counter() - start) * 1e3)
print(json.dumps({"ms": sorted(times)[len(times) // 2]}))
