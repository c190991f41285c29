"""NeMo-RL's remote sparse refit: a stand-in for S3, the payloads, and the calls of its synchroniser."""

import hashlib
import hmac
import http.server
import io
import json
import threading
import urllib.error
import urllib.request
import uuid

import pytest
import torch
from tensors import checksum

BUCKET, REGION, API_KEY = "weights", "eu-west-1", "a key of the trainer's"
zstandard = pytest.importorskip("zstandard")
ACCESS = dict(
    AWS_ACCESS_KEY_ID="AKIDEXAMPLE",
    AWS_SECRET_ACCESS_KEY="wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    AWS_SESSION_TOKEN="a session",
)


def signature(headers, path):
    """The AWS Signature Version 4 of a GET, from its documentation."""

    def mac(key, text):
        return hmac.new(key, text.encode(), hashlib.sha256).digest()

    names = "host;x-amz-content-sha256;x-amz-date;x-amz-security-token"
    canonical = "\n".join(
        [
            "GET",
            path,
            "",
            *[f"{name}:{headers[name]}" for name in names.split(";")],
            "",
            names,
            hashlib.sha256(b"").hexdigest(),
        ]
    )
    time = headers["x-amz-date"]
    scope = f"{time[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", time, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + ACCESS["AWS_SECRET_ACCESS_KEY"]).encode()
    for part in (time[:8], REGION, "s3", "aws4_request"):
        key = mac(key, part)
    credential = f"{ACCESS['AWS_ACCESS_KEY_ID']}/{scope}"
    return f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={mac(key, text).hex()}"


class Store(http.server.ThreadingHTTPServer):
    """A stand-in for S3: objects by path, for signed requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.reads, self.fail = {}, [], {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def put(self, key, body):
        self.objects[f"/{BUCKET}/{urllib.request.quote(key, safe='/~')}"] = body


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self.server.reads.append(self.path)
        body = self.server.objects.get(self.path)
        status = (
            403
            if self.headers.get("authorization") != signature(self.headers, self.path)
            else 404
            if body is None
            else 200
        )
        times = self.server.fail.get(self.path, 0)
        if times > 0:
            self.server.fail[self.path], status = times - 1, 503
        self.send_response(status)
        self.send_header("content-length", str(len(body) if status == 200 else 0))
        self.end_headers()
        if status == 200:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def gaps(positions):
    """Encodes positions as their differences, in the smallest sufficient integers."""
    between = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    dtype = torch.uint16 if int(between.max()) <= 0xFFFF else torch.uint32
    return between.to(torch.int64).to(dtype).view(torch.uint8)


def encode(changes):
    """Packs entries (name, tensor, positions, values as integers, operation) into (positions, values by dtype, items).
    """
    blob, values, items, at = [], [], [], [0, 0]
    for name, tensor, positions, held, operation in changes:
        is_range = int(positions[-1] - positions[0]) + 1 == len(positions)
        where = torch.empty(0, dtype=torch.uint8) if is_range else gaps(positions)
        item = dict(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype)[len("torch.") :],
            operation=operation,
            index_start=at[0],
            index_end=at[0] + len(where),
            value_group=0,
            value_start=at[1],
            value_end=at[1] + len(held),
            index_encoding="range" if is_range else "deltas",
        )
        items.append(item | (dict(range_start=int(positions[0])) if is_range else {}))
        at = [at[0] + len(where), at[1] + len(held)]
        blob.append(where)
        values.append(held)
    return torch.cat(blob), (torch.cat(values),), items


def packed(payload):
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return zstandard.ZstdCompressor(level=1).compress(buffer.getvalue())


def digest(body):
    return hashlib.blake2b(body, digest_size=16).hexdigest()


class Failed(RuntimeError):
    pass


class Trainer:
    """The synchroniser: prepare, store and announce each payload, then one flush. A failure stops it for good."""

    def __init__(self, engine, store):
        self.engine, self.store, self.baseline, self.overwrite = engine, store, None, []

    def post(self, path, body, key=API_KEY):
        request = urllib.request.Request(
            f"{self.engine.url}/nemo-rl/refit/{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json", **({"x-nemo-rl-refit-key": key} if key else {})},
        )
        for attempt in range(4):
            try:
                with urllib.request.urlopen(request) as reply:
                    result = json.loads(reply.read())
                assert result["ok"] is True
                return result
            except urllib.error.HTTPError as error:
                text = error.read().decode()
                if error.code not in (502, 503, 504) or attempt == 3:
                    assert json.loads(text)["ok"] is False
                    raise Failed(f"{error.code}: {text[:512]}") from None

    def init(self, weights):
        self.baseline = weights
        tensors = {name: [list(tensor.shape), str(tensor.dtype)[len("torch.") :]] for name, tensor in weights.items()}
        self.overwrite = self.post("prepare", dict(tensors=tensors))["overwrite_names"]

    def changes(self, weights, operation="xor"):
        for name, tensor in weights.items():
            old, new = self.baseline[name].view(torch.int16).flatten(), tensor.view(torch.int16).flatten()
            positions = (old != new).nonzero().flatten()
            own = "overwrite" if name in self.overwrite else operation
            if len(positions):
                yield name, tensor, positions, new[positions] ^ old[positions] if own == "xor" else new[positions], own

    def send(self, changes, key=None, corrupt=None, **fields):
        body = packed(encode(changes))
        key = key or f"runs/a b/{uuid.uuid4().hex}/000000.pt"
        self.store.put(key, corrupt(body) if corrupt else body)
        return self.post(
            "s3-manifest",
            dict(bucket=BUCKET, region=REGION, key=key, checksum=digest(body), verification_candidates=3) | fields,
        )

    def sync(self, weights, operation="xor", each=4):
        changes = list(self.changes(weights, operation))
        replies = [self.send(changes[at : at + each]) for at in range(0, len(changes), each)]
        assert all(reply["payloads"] == 1 for reply in replies)
        done = self.post("flush", {})
        assert done["payloads"] == len(replies) and int(done["verification_candidates"]) == 3 * len(replies)
        self.baseline = weights
        return done

    def holds(self, weights):
        request = urllib.request.Request(
            f"{self.engine.url}/weights_checker",
            json.dumps(dict(action="checksum")).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"},
        )
        with urllib.request.urlopen(request) as reply:
            got = json.loads(reply.read())["checksums"]
        wrong = [name for name, tensor in weights.items() if got.get(name) != checksum(tensor)]
        assert not wrong, f"{len(wrong)} of {len(weights)} tensors are not what was sent: {wrong[:5]}"
