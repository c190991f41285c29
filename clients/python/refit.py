"""A client of refit for trainers: generation, control, and weights by whichever way reaches the engine.

    from refit import Client

    client = Client("http://127.0.0.1:30000")
    with client.update(version="step-1") as update:
        update.add_all(model)
    print(client.generate("12+34=", {"max_new_tokens": 4})["text"])

Standard library only; torch is imported where tensors are touched. Python 3.9 or newer. README.md beside this file is the manual.
"""

import base64
import contextlib
import ctypes
import datetime
import http.client
import io
import ipaddress
import json
import os
import re
import socket
import ssl
import struct
import time
import urllib.parse
import uuid
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

__version__ = "0.1.0"

MIB = 1 << 20
# A request may bring this many files of shared memory, of which every tensor that is not copied into a bucket may be one.
MOST_TENSORS = 4000
# The server keeps tensors under this many names (docs/tensor-updates.md).
MOST_KEPT = 8
# No connection was made; or one was, and nobody knows whether the server got the request.
LOST = ("UNREACHABLE", "NO_REPLY")
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class RefitError(Exception):
    """What a server refused, or that it did not answer.

    status: HTTP status; 0 where there was no whole reply. code: refit's own (`WEIGHTS_TORN`, `QUEUE_FULL`, ... : src/errors.ts), or `UNREACHABLE`,
    `NO_REPLY`, `TIMEOUT`, `BAD_REPLY`, `HTTP_<status>` where the server told none. message: its words. param: the field at fault, or None. url: whose answer.
    """

    def __init__(self, status, code, message, param=None, url=""):
        super().__init__(f"{url}: {status or 'no reply'} {code}: {message}" if url else message)
        self.status, self.code, self.message, self.param, self.url = status, code, message, param, url

    def __reduce__(self):
        return type(self), (self.status, self.code, self.message, self.param, self.url)


class EnginesFailed(RefitError):
    """Some of several engines failed. errors: {url: exception}; status and code are those of the first."""

    def __init__(self, errors):
        first = next(iter(errors.values()))
        super().__init__(getattr(first, "status", 0), getattr(first, "code", "NO_REPLY"), "; ".join(str(error) for error in errors.values()))
        self.errors = errors

    def __reduce__(self):
        return type(self), (self.errors,)


# --- several engines at once ---


def ask(engines, call):
    """{engine: future of call(engine)}, all at once: some calls return only when all engines have come."""
    pool = ThreadPoolExecutor(len(engines))
    asked = {engine: pool.submit(call, engine) for engine in engines}
    pool.shutdown(wait=False)
    return asked


def answers(asked):
    """{engine: result}, once all have answered. Raises the error of an engine that is alone, EnginesFailed for several."""
    failed = {engine.url: future.exception() for engine, future in asked.items() if future.exception() is not None}
    if failed:
        raise next(iter(failed.values())) if len(asked) == 1 else EnginesFailed(failed)
    return {engine: future.result() for engine, future in asked.items()}


class Engines:
    """What one client and several have in common. engines: a list of Client."""

    def each(self, call):
        """{engine: call(engine)}, in parallel."""
        return answers(ask(self.engines, call))

    def update(self, version=None, **options):
        """A context in which tensors are added; see Update for the options."""
        return Update(self, version, **options)

    def group(self, **options):
        """A process group of this process and all ranks of the engines; see Group for the options."""
        return Group(self, **options)

    @contextlib.contextmanager
    def paused(self, mode="retract"):
        """Generation is paused meanwhile, on all engines, and goes on afterwards whatever happens."""
        try:
            self.pause(mode)
        except BaseException:
            # Some may stand still already.
            with contextlib.suppress(RefitError):
                self.resume()
            raise
        try:
            yield self
        finally:
            self.resume()


class Client(Engines):
    """One server (or a gateway), by its url, which may have a path.

    api_key, admin_key: bearer keys; the admin key (default: the API key) is for weights, memory, pause and abort. timeout: seconds without a byte
    after which a call fails, None for ever: updates wait for running requests, so that it should be minutes. retries: how often a call that can
    be repeated is, where there was no reply. owner: who opens transactions, in words; a trainer that starts again under the same words takes over
    what it left open.
    """

    def __init__(self, url, api_key=None, admin_key=None, timeout=None, retries=2, owner=None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://host:port, got {url!r}")
        self.url = url.rstrip("/")
        self.host, self._tls, self._prefix = parts.hostname, parts.scheme == "https", parts.path.rstrip("/")
        self.port = parts.port or (443 if self._tls else 80)
        self._api_key, self._admin_key = api_key, admin_key or api_key
        self.timeout, self.retries = timeout, retries
        self.owner = owner or f"refit.py {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self.engines = [self]
        self.kept = {}

    # HTTP

    def call(self, method, path, body=None, admin=False, retry=None, headers=None, length=None):
        """The reply: what its JSON holds, or a text. Raises RefitError.

        body: None, something that becomes JSON, or a function that returns buffers, one after another, of `length` bytes in all.
        retry: whether it may be sent again where there was no reply; default: GET alone. An answer is never repeated, a timeout neither.
        """
        tries = 1 + (self.retries if (method == "GET" if retry is None else retry) else 0)
        for attempt in range(tries):
            try:
                with self._open(method, path, body, admin, headers, length) as response:
                    return self._content(response)
            except RefitError as error:
                if error.code not in LOST or attempt + 1 == tries:
                    raise
                time.sleep(0.2 * 2**attempt)

    def json(self, method, path, body=None, **options):
        """As `call`, of a route that answers with an object."""
        reply = self.call(method, path, body, **options)
        if not isinstance(reply, dict):
            raise RefitError(200, "BAD_REPLY", f"{method} {path}: expected a JSON object, got {str(reply)[:200]!r}", url=self.url)
        return reply

    @contextlib.contextmanager
    def _open(self, method, path, body=None, admin=False, headers=None, length=None):
        """The response, below 400, its body unread. A connection of its own: none that has been idle can break under a request."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout, **({"context": ssl.create_default_context()} if self._tls else {}))
        try:
            with self._named(f"{method} {path}", "UNREACHABLE"):
                connection.connect()
            with self._named(f"{method} {path}", "NO_REPLY"):
                response = self._send(connection, method, path, body, admin, headers, length)
                if response.status >= 400:
                    raise self._refusal(response)
                yield response
        finally:
            connection.close()

    def _send(self, connection, method, path, body, admin, headers, length):
        headers = {"accept": "application/json", **(headers or {})}
        key = self._admin_key if admin else self._api_key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if callable(body):
            body, headers["content-length"] = body(), str(length)
        elif body is not None:
            body, headers["content-type"] = json.dumps(body).encode(), "application/json"
        # Refused in the middle of a body: the answer is there, and says more than a broken pipe.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, self._prefix + path, body, headers)
        return connection.getresponse()

    @contextlib.contextmanager
    def _named(self, what, code):
        """Errors of sockets and of HTTP as RefitError of a code."""
        try:
            yield
        except socket.timeout:
            raise RefitError(0, "TIMEOUT", f"{what}: nothing came for {self.timeout} s", url=self.url) from None
        except (OSError, http.client.HTTPException) as error:
            raise RefitError(0, code, f"{what}: {type(error).__name__}: {error}", url=self.url) from error

    def _content(self, response):
        text = response.read().decode(errors="replace")
        if "json" not in response.headers.get("content-type", ""):
            return text
        try:
            content = json.loads(text)
        except ValueError:
            raise RefitError(response.status, "BAD_REPLY", f"no JSON: {text[:200]!r}", url=self.url) from None
        if isinstance(content, dict) and content.get("success") is False:
            raise RefitError(response.status, "FAILED", str(content.get("message")), url=self.url)
        return content

    def _refusal(self, response):
        """Every form that servers have for errors; pages of proxies too."""
        try:
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            text = f"its body broke off: {error}"
        try:
            content = json.loads(text)
        except ValueError:
            content = {}
        content = content if isinstance(content, dict) else {}
        inner = content.get("error") if isinstance(content.get("error"), dict) else {}
        said = inner.get("message") or content.get("message") or content.get("error_message") or content.get("error") or content.get("detail") or text[:500]
        code = inner.get("code") if isinstance(inner.get("code"), str) else f"HTTP_{response.status}"
        return RefitError(response.status, code, str(said), content.get("param") or inner.get("param"), self.url)

    # state

    def health(self):
        """{"status": "ok" | "paused" | "torn" | "asleep" | ..., "weights": {...}, "weight_version": ...}. Does not fail while the process answers."""
        return self.json("GET", "/health")

    def ready(self):
        """Whether it generates."""
        try:
            self.call("GET", "/ready", retry=False)
        except RefitError as error:
            if error.status not in (0, 503):
                raise
            return False
        return True

    def wait_ready(self, timeout_s=600):
        """Until it generates. Raises TimeoutError with what it said last."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} was not ready after {timeout_s} s")
            time.sleep(0.2)

    def server_info(self):
        return self.json("GET", "/server_info")

    def capabilities(self):
        return self.json("GET", "/capabilities")

    def ranks(self):
        """Of a process group, or of a list of handles: one for each card (or virtual rank)."""
        info = self.server_info()
        return info["tp_size"] * info.get("pp_size", 1)

    def version(self):
        """The label of the weights."""
        return self.json("GET", "/weight_version")["weight_version"]

    def set_version(self, version, abort_all_requests=False):
        return self.json("POST", "/update_weight_version", dict(new_version=version, abort_all_requests=abort_all_requests), admin=True, retry=True)

    def weights(self):
        """The state of their bytes: {"state": "current"}, {"state": "torn", "tensors": [...], "reason": ...} or {"state": "asleep", "tags": [...]}."""
        return self.health()["weights"]

    def checksums(self):
        """{checkpoint name: 16 hex digits} of what the engine holds (docs/checksum.md)."""
        return self.json("POST", "/weights_checker", dict(action="checksum"), admin=True, retry=True)["checksums"]

    def check_weights(self, action):
        """ "snapshot", "reset_tensors" or "compare"."""
        return self.json("POST", "/weights_checker", dict(action=action), admin=True)

    # generation

    def generate(self, prompt, sampling_params=None, **fields):
        """One output, or a list where the prompt is a batch or n > 1: {"text", "output_ids", "meta_info"}.

        prompt: a text, token ids, or a list of either. fields: others of /generate (`return_logprob`, `rid`, ...).
        """
        return self.call("POST", "/generate", generate_body(prompt, sampling_params, fields, False))

    def stream(self, prompt, sampling_params=None, **fields):
        """Outputs as they grow, each with everything so far. Leaving the loop ends the request."""
        with self._open("POST", "/generate", generate_body(prompt, sampling_params, fields, True)) as response:
            for line in iter(response.readline, b""):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    error = event["error"]
                    raise RefitError(error.get("code") or 0, error.get("refit_code") or "FAILED", error.get("message", ""), url=self.url)
                yield event
            raise RefitError(0, "NO_REPLY", "the stream broke off", url=self.url)

    def abort(self, rid=None):
        """Ends a request, or all."""
        return self.call("POST", "/abort_request", dict(abort_all=True) if rid is None else dict(rid=rid), admin=True, retry=True)

    def pause(self, mode="abort"):
        """ "abort" ends running requests with what they have, "retract" computes them again afterwards, "in_place" freezes them."""
        return self.call("POST", "/pause_generation", dict(mode=mode), admin=True, retry=True)

    def resume(self):
        return self.call("POST", "/continue_generation", {}, admin=True, retry=True)

    def flush(self, timeout_s=0):
        """Drops the prefix cache, once the engine is idle: at most so many seconds. Raises RefitError 400 where it was not."""
        return self.call("POST", f"/flush_cache?timeout={timeout_s}", admin=True, retry=True)

    # memory

    def release_memory(self, tags=None):
        """ "weights", "kv_cache", "cuda_graph"; None: all. Not repeated by itself: what is released cannot be released again."""
        return self.call("POST", "/release_memory_occupation", dict(tags=tags), admin=True)

    def resume_memory(self, tags=None):
        """Weights come back torn, unless the server keeps a copy: write them before anything generates."""
        return self.call("POST", "/resume_memory_occupation", dict(tags=tags), admin=True)

    # whole updates of one request

    def update_from_disk(self, path, version=None, **fields):
        """From a folder, a safetensors file or an index that the server sees, inside its --model-root."""
        return self.json("POST", "/update_weights_from_disk", dict(model_path=str(path), weight_version=version, **fields), admin=True, retry=True)

    def upload(self, *files, version=None, **fields):
        """Sends safetensors: paths, or lists of (name, tensor). One goes as it is (application/octet-stream), several as a form: one update."""
        fields = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in dict(fields, weight_version=version).items() if value is not None
        }
        bodies = [PathBody(file) if isinstance(file, (str, os.PathLike)) else SafetensorsBody(file) for file in files]
        path, kind = "/update_weights_from_tensor", "application/octet-stream"
        if len(bodies) == 1:
            path, body = path + "?" + urllib.parse.urlencode(fields), bodies[0]
        else:
            body = FormBody(fields, bodies)
            kind = f"multipart/form-data; boundary={body.boundary}"
        return self.json("POST", path, body.parts, length=body.length, headers={"content-type": kind}, admin=True, retry=True)

    def update_from_tensors(self, entries, **fields):
        """Handles: base64 of pickles, one for each rank or one for all."""
        return self.json("POST", "/update_weights_from_tensor", dict(serialized_named_tensors=entries, **fields), admin=True)

    def release_kept(self, name=None):
        """The server closes what it keeps open (`transport="kept"`), under a name or all."""
        self.kept.clear()
        return self.json("POST", "/release_kept_tensors", dict(name=name), admin=True, retry=True)["released"]


class Clients(Engines):
    """Several engines that get the same weights. Control goes to all at once and returns {engine: reply}; for generation use one of `engines`, or a gateway."""

    def __init__(self, urls, **options):
        self.engines = [url if isinstance(url, Client) else Client(url, **options) for url in urls]
        if not self.engines:
            raise ValueError("urls: at least one")


def _on_all(name):
    def method(self, *args, **options):
        return self.each(lambda engine: getattr(engine, name)(*args, **options))

    method.__name__, method.__doc__ = name, f"Client.{name} on all engines: {{engine: result}}. Raises EnginesFailed."
    return method


for _name in """health ready wait_ready server_info version set_version weights checksums check_weights abort pause resume flush release_memory resume_memory
        update_from_disk upload release_kept""".split():  # fmt: skip
    setattr(Clients, _name, _on_all(_name))


def generate_body(prompt, sampling_params, fields, stream):
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    text = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], str))
    return {"text" if text else "input_ids": prompt, "sampling_params": sampling_params or {}, **fields, "stream": stream}


# --- bodies of uploads ---


class PathBody:
    def __init__(self, path):
        self.path, self.length, self.name = path, os.path.getsize(path), os.path.basename(path)

    def parts(self):
        with open(self.path, "rb") as file:
            yield from iter(lambda: file.read(8 * MIB), b"")


class SafetensorsBody:
    """Tensors as a safetensors file: eight bytes of the header's length (little endian), the header as JSON, then their bytes (row-major)."""

    name = "model.safetensors"

    def __init__(self, named):
        header, at, self.tensors = {}, 0, []
        for name, tensor in named:
            dtype = dtype_name(tensor.dtype)
            if dtype not in SAFETENSORS_DTYPES:
                raise TypeError(f"{name}: {dtype} is not uploaded; cast it to one of {', '.join(SAFETENSORS_DTYPES)}")
            size = tensor.numel() * tensor.element_size()
            header[name] = dict(dtype=SAFETENSORS_DTYPES[dtype], shape=list(tensor.shape), data_offsets=[at, at + size])
            at += size
            self.tensors.append(tensor)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.head = struct.pack("<Q", len(text)) + text
        self.length = len(self.head) + at

    def parts(self):
        yield self.head
        for tensor in self.tensors:
            tensor = tensor.detach().cpu().contiguous()
            size = tensor.numel() * tensor.element_size()
            # The memory itself: numpy has no bfloat16, and need not be there.
            if size > 0:
                yield memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class FormBody:
    """multipart/form-data (RFC 7578); fields stand before files."""

    def __init__(self, fields, files):
        self.boundary = uuid.uuid4().hex
        self.pieces = [(self.head(name) + str(value).encode(), None) for name, value in fields.items()]
        self.pieces += [(self.head(f"file{i}", f"{i}-{file.name}"), file) for i, file in enumerate(files)]
        self.length = sum(len(head) + (file.length if file else 0) + 2 for head, file in self.pieces) + len(self.boundary) + 6

    def head(self, name, file=None):
        about = f'; filename="{urllib.parse.quote(file)}"\r\ncontent-type: application/octet-stream' if file else ""
        return f'--{self.boundary}\r\ncontent-disposition: form-data; name="{name}"{about}\r\n\r\n'.encode()

    def parts(self):
        for head, file in self.pieces:
            yield head
            if file:
                yield from file.parts()
            yield b"\r\n"
        yield f"--{self.boundary}--\r\n".encode()


# --- tensors ---


def dtype_name(dtype):
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).rsplit(".", 1)[-1]


@dataclass
class FlattenedTensorMetadata:
    """Where a tensor lies in a flat one: bytes. Servers know SGLang's class of this name, whatever its module."""

    name: str
    shape: object
    dtype: object
    start_idx: int
    end_idx: int
    numel: int


def pickled(obj):
    """Base64 of torch's pickle of handles. Storages on the CPU go by the names of files: the server is no child of this process."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as tm

    strategy, buffer = tm.get_sharing_strategy(), io.BytesIO()
    tm.set_sharing_strategy("file_system")
    try:
        ForkingPickler(buffer).dump(obj)
    finally:
        tm.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def handle(tensor):
    """Something to pickle for a tensor: on a card {UUID: what rebuilds it}, so that both sides may number cards as they like."""
    if tensor.device.type != "cuda":
        return tensor
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)}


def full(tensor):
    """The whole of a tensor. A DTensor's is gathered: all ranks of its mesh must come here, in the same order."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


# What wrappers put into names: torch.compile, FSDP1, activation checkpoints.
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def weights_of(model):
    """(name in checkpoints, tensor as it lies) of a module's parameters and persistent buffers; tied ones once. Sharded ones stay so: see `full`."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    stored = set(model.state_dict().keys())
    named = list(model.named_parameters()) + [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in named:
        name = WRAPPERS.sub("", name)
        name = name[7:] if name.startswith("module.") else name
        if "lora_" in name:
            raise ValueError(f"{name}: refit applies no adapters; send the model after merge_and_unload()")
        if not (tied and name == "lm_head.weight"):
            yield name, tensor


def checkpoint_form(model, name, tensor):
    """transformers 5 fuses experts in memory; checkpoints, and refit, have them one by one. [(name, tensor)]"""
    if not re.search(r"\.experts\.(?!\d)", name):
        return [(name, tensor)]
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: tensor}).items())


# --- an update ---


class Ranks:
    """The trainer's processes that send together. Rank 0 speaks to the engines; all come through here in the same order. group None: this process alone."""

    def __init__(self, group=None):
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, mine):
        """What all ranks have, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        gathered = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def first(self, act):
        """What rank 0 got from act(), on all ranks; where it failed, all fail with its error."""
        told = [None, None]
        if self.rank == 0:
            try:
                told[0] = act()
            except Exception as error:
                told[1] = error
        if self.size > 1:
            import torch.distributed as dist

            if told[1] is not None and not isinstance(told[1], RefitError):
                told[1] = RuntimeError(f"rank 0: {told[1]!r}")
            dist.broadcast_object_list(told, dist.get_global_rank(self.group, 0), group=self.group)
        if told[1] is not None:
            raise told[1]
        return told[0]


class Update:
    """Tensors for one or more engines, as one transaction on each: nothing is generated from a mixture, and the label moves at the end.

    An exception in the block gives the transaction up: `outcome` then says, by engine's url, what its weights are ("old", "new", or "torn":
    it answers 503 until they are written again), or why that is unknown. The label has not moved, and the next update may bring everything.

    version: the new label. transport: "handles" (shared memory or CUDA IPC; one machine), "kept" (the same, kept open from update to update),
    "upload" (bytes over HTTP), "group" (broadcast in a process group), "file" (safetensors in a folder that the engines see), or "auto":
    "group" if a group is given, "file" if a folder is, "handles" for engines of this machine, else "upload".
    bucket_bytes: how much goes in one request; a larger tensor goes alone. dtype: tensors are cast to it first (a torch.dtype).
    expected: "all", or names without which the end fails. deadline: seconds that the transaction may take (default: the server's).
    flush_cache: drop the prefix cache. abort_all_requests: end running requests instead of waiting for them.
    in_place: "handles" and "kept" share tensors where they lie instead of copying them into a bucket; they must live until the end, and for
    "kept" until the next update, which brings the same ones. process_group: of all trainer's ranks that come through the block (FSDP, or one
    sender for each rank of the engine): each adds the same tensors in the same order. group, folder: of "group" and "file".
    """

    def __init__(self, engines, version=None, transport="auto", bucket_bytes=512 * MIB, dtype=None, expected=None, deadline=None, flush_cache=True,
                 abort_all_requests=False, in_place=False, process_group=None, group=None, folder=None):  # fmt: skip
        if transport != "auto" and transport not in TRANSPORTS:
            raise ValueError(f"transport: expected auto or one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if (transport == "group" and group is None) or (transport == "file" and folder is None):
            raise ValueError(f"transport {transport!r} needs {'group=' if transport == 'group' else 'folder='}")
        self.engines, self.version, self.bucket_bytes, self.dtype, self.in_place = engines, version, int(bucket_bytes), dtype, in_place
        self.group, self.folder, self.ranks = group, folder, Ranks(process_group)
        self.fields = dict(flush_cache=flush_cache, abort_all_requests=abort_all_requests)
        self._opening = dict(expected=expected, deadline=deadline, weight_version=version)
        self.transport, self._transport, self._bucket, self._ids = transport, None, None, {}
        self.outcome, self.report = {}, None
        self.tensors = self.bytes = self.requests = 0

    def add(self, name, tensor):
        """A whole tensor by its name in checkpoints, of any strides. It may be changed once this returns, unless it is shared in place."""
        tensor = full(tensor)
        if self.dtype is not None:
            tensor = tensor.to(self.dtype)
        if self._transport is None:
            self._begin()
        bytes = tensor.numel() * tensor.element_size()
        if self._bucket is not None and self._transport.full(self._bucket, bytes):
            self.flush()
        if self._bucket is None:
            self._bucket = Bucket()
        self._transport.put(self._bucket, name, tensor)

    def add_all(self, weights):
        """A module, a state dict, or (name, tensor) pairs. All ranks of an FSDP model come here; each tensor is gathered, sent and let go."""
        if hasattr(weights, "named_parameters"):
            for name, tensor in weights_of(weights):
                for own_name, own in checkpoint_form(weights, name, full(tensor)):
                    self.add(own_name, own)
        else:
            for name, tensor in weights.items() if hasattr(weights, "items") else weights:
                self.add(name, tensor)

    def flush(self):
        """Sends what was added. If it fails, the bucket stays: this may be called again."""
        if self._bucket is None:
            return
        self._transport.send(self._bucket)
        self.tensors, self.bytes, self.requests = self.tensors + len(self._bucket.entries), self.bytes + self._bucket.bytes, self.requests + 1
        self._bucket = None

    def transaction(self, engine):
        """Fields that make a request part of this update."""
        return dict(self.fields, transaction=self._ids[engine])

    def _begin(self):
        def first():
            wanted = self.transport if self.transport != "auto" else self._choose()
            infos = self.engines.each(lambda engine: engine.server_info())
            self.engines.each(self._open)
            return wanted, [(ranks_behind(info), info.get("device", "cuda")) for info in infos.values()]

        self.transport, infos = self.ranks.first(first)
        self._transport = TRANSPORTS[self.transport](self, infos)

    def _open(self, engine):
        body = {name: value for name, value in self._opening.items() if value is not None}
        # Repeated under the same owner, it takes the place of the one whose answer was lost.
        self._ids[engine] = engine.json("POST", "/weight_transactions", dict(body, owner=engine.owner), admin=True, retry=True)["id"]

    def _choose(self):
        if self.group is not None:
            return "group"
        if self.folder is not None:
            return "file"
        return "handles" if all(is_local(engine.host) for engine in self.engines.engines) else "upload"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                self._end()
            else:
                self._give_up(error)
        except BaseException as failed:
            self._give_up(failed)
            raise
        finally:
            # What is shared is let go.
            self._transport = self._bucket = None

    def _end(self):
        self.flush()
        if self._transport is None:
            self._begin()
        self._transport.end()
        self.report = self.ranks.first(lambda: {engine.url: reply for engine, reply in self.engines.each(self._commit).items()})

    def _commit(self, engine):
        reply = engine.json("POST", f"/weight_transactions/{self._ids[engine]}/commit", {}, admin=True, retry=True)
        self.outcome[engine.url] = "new"
        return reply

    def _give_up(self, why):
        """On every engine that has not committed; whatever fails here must not hide why."""
        reason = f"{type(why).__name__}: {why}"

        def abort(engine):
            try:
                reply = engine.json("POST", f"/weight_transactions/{self._ids[engine]}/abort", dict(reason=reason[:900]), admin=True, retry=True)
                self.outcome[engine.url] = reply["outcome"]
            except Exception as error:
                self.outcome[engine.url] = error

        left = [engine for engine in self._ids if self.outcome.get(engine.url) != "new"]
        if left and self.ranks.rank == 0:
            answers(ask(left, abort))


class Bucket:
    """What goes in one request. entries: (name, dtype, shape, first byte, bytes), in order; tensors:
    where they lie, or `flat`: one tensor of all their bytes."""

    def __init__(self):
        self.entries, self.tensors, self.flat, self.bytes = [], [], None, 0

    def note(self, name, tensor):
        size = tensor.numel() * tensor.element_size()
        self.entries.append((name, tensor.dtype, tensor.shape, self.bytes, size))
        self.bytes += size

    def named(self):
        return [(entry[0], tensor) for entry, tensor in zip(self.entries, self.tensors)]

    def copy_in(self, tensor, device):
        """Behind the others, into the flat tensor. It grows by doubling, so that a small update takes little of a card."""
        import torch

        at, size = self.entries[-1][3:]
        if self.flat is None or self.flat.numel() < at + size:
            grown = torch.empty(max(at + size, 64 * MIB if self.flat is None else 2 * self.flat.numel()), dtype=torch.uint8, device=device)
            if at > 0:
                grown[:at].copy_(self.flat[:at])
            self.flat = grown
        self.flat[at : at + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))


class Transport:
    """update: whose; infos: (ranks of each engine behind it, device) of each engine.

    Ranks of the trainer other than 0 keep count, and no tensors, unless they send too."""

    def __init__(self, update, infos):
        self.update, self.infos, self.ranks = update, infos, update.ranks
        self.engines = update.engines

    def put(self, bucket, name, tensor):
        bucket.note(name, tensor)
        if self.ranks.rank == 0:
            bucket.tensors.append(tensor)

    def full(self, bucket, more):
        """Whether so many more bytes belong in the next one."""
        return bucket.bytes + more > self.update.bucket_bytes or len(bucket.entries) >= MOST_TENSORS

    def send(self, bucket):
        self.ranks.first(lambda: self.post(bucket))

    def end(self):
        """Before the commit."""


class Upload(Transport):
    def post(self, bucket):
        self.engines.each(lambda engine: engine.upload(bucket.named(), **self.update.transaction(engine)))


class File(Transport):
    """Shards under the folder, then an index, written last; the engines read it at the end. What is there stays there."""

    def __init__(self, update, infos):
        super().__init__(update, infos)
        self.folder = os.path.join(update.folder, re.sub(r"[^\w.-]", "_", update.version or f"update-{time.time_ns()}"))
        self.map = {}

    def post(self, bucket):
        os.makedirs(self.folder, exist_ok=True)
        name = f"model-{self.update.requests + 1:05d}.safetensors"
        self.write(name, SafetensorsBody(bucket.named()).parts())
        self.map.update((entry[0], name) for entry in bucket.entries)

    def end(self):
        self.ranks.first(self.load)

    def load(self):
        if self.map:
            self.write("model.safetensors.index.json", [json.dumps(dict(metadata={}, weight_map=self.map)).encode()])
            self.engines.each(lambda engine: engine.update_from_disk(os.path.abspath(self.folder), **self.update.transaction(engine)))

    def write(self, name, parts):
        path = os.path.join(self.folder, name)
        with open(path + ".part", "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".part", path)


class Handles(Transport):
    """Each rank of an engine reads the memory of one trainer's rank: its own number, modulo how many send. The flat tensor is used again for each bucket."""

    flat = None

    def put(self, bucket, name, tensor):
        senders = max(max(counts) for counts, _ in self.infos)
        bucket.note(name, tensor)
        if self.ranks.rank >= senders:
            return
        # An engine on the CPU reads no card.
        device = tensor.device if all(device == "cuda" for _, device in self.infos) else "cpu"
        if self.update.in_place:
            bucket.tensors.append(tensor.to(device))
            return
        bucket.flat = self.place() if bucket.flat is None else bucket.flat
        bucket.copy_in(tensor, device)
        self.placed(bucket.flat)

    def place(self):
        return self.flat

    def placed(self, flat):
        self.flat = flat

    def load_format(self):
        return None if self.update.in_place else "flattened_bucket"

    def payload(self, bucket):
        if self.update.in_place:
            return [(name, handle(tensor)) for name, tensor in bucket.named()]
        metadata = [FlattenedTensorMetadata(name, shape, dtype, at, at + size, size) for name, dtype, shape, at, size in bucket.entries]
        return {"flattened_tensor": handle(bucket.flat[: bucket.bytes]), "metadata": metadata}

    def entries(self, bucket):
        """For each engine its texts, one for each of its ranks, on every rank. One that sends to an engine pickles once for it: equal texts are one
        pickle to a server, and a pickle counts as one reader."""
        mine = {}
        for index, (counts, _) in enumerate(self.infos):
            for part, count in enumerate(counts):
                if self.ranks.rank < count:
                    mine[index, part] = pickled(self.payload(bucket))
        every = self.ranks.gather(mine)
        return [
            [every[rank % self.ranks.size][index, part] for part, count in enumerate(counts) for rank in range(count)]
            for index, (counts, _) in enumerate(self.infos)
        ]

    def send(self, bucket):
        self.offer(bucket)

    def offer(self, bucket, **fields):
        fields = dict(fields, load_format=self.load_format())
        retries = self.engines.engines[0].retries
        for attempt in range(retries + 1):
            texts = dict(zip(self.engines.engines, self.entries(bucket)))
            try:
                self.ranks.first(
                    lambda: self.engines.each(lambda engine: engine.update_from_tensors(texts[engine], **fields, **self.update.transaction(engine)))
                )  # noqa: B023
                return
            except RefitError as error:
                for failed in error.errors.values() if isinstance(error, EnginesFailed) else [error]:
                    if getattr(failed, "code", None) == "UNREACHABLE":
                        self.take_back(bucket)
                # Handles are made anew: those that a server has seen have been given back.
                if error.code not in LOST or attempt == retries:
                    raise
                time.sleep(0.2 * 2**attempt)
            finally:
                collect(bucket)

    def take_back(self, bucket):
        """The references of a request that nobody has got."""
        for tensor in [bucket.flat] if bucket.flat is not None else bucket.tensors:
            if tensor.device.type == "cpu":
                tensor.untyped_storage()._shared_decref()


def collect(bucket):
    """torch takes back what the server has given back."""
    tensor = bucket.flat if bucket.flat is not None else next(iter(bucket.tensors), None)
    if tensor is not None and tensor.device.type == "cuda":
        import torch

        torch.cuda.ipc_collect()


class Kept(Handles):
    """The first update brings handles, which the engines keep open; later ones only say that the memory holds new values. A bucket lies in a flat tensor
    of its own that stays, or (in_place) its tensors are where they were. Other memory, another layout or a server that forgot: handles again."""

    def place(self):
        held = self.store().get(self.update.requests)
        return None if held is None else held["flat"]

    def placed(self, flat):
        pass

    def full(self, bucket, more):
        # The last name that there is takes all the rest.
        return self.update.requests + 1 < MOST_KEPT and super().full(bucket, more)

    def store(self):
        return self.engines.engines[0].kept

    def send(self, bucket):
        index, held = self.update.requests, self.store().get(self.update.requests)
        if all(self.ranks.gather(held is not None and held["layout"] == self.layout(bucket))):
            synchronize(bucket)
            if self.ranks.first(lambda: self.again(held)):
                return
        generation = time.time_ns() // 1000
        name = held["name"] if held is not None else f"{self.engines.engines[0].owner} {index}"[:200]
        name, generation = self.ranks.first(lambda: (name, generation))
        # Before it is offered: whatever the server still keeps under the name, it is not this.
        self.store().pop(index, None)
        self.offer(bucket, keep=dict(name=name, generation=generation))
        # After it: sharing has moved memory of the CPU.
        self.store()[index] = dict(name=name, generation=generation, layout=self.layout(bucket), flat=bucket.flat, tensors=list(bucket.tensors))

    def layout(self, bucket):
        """What must be the same for what is kept to be of use."""
        places = [bucket.flat.data_ptr()] if bucket.flat is not None else [(tensor.data_ptr(), tensor.stride()) for tensor in bucket.tensors]
        return bucket.entries, places, self.infos

    def again(self, held):
        """Whether all engines had it still, and have written it."""
        kept = dict(name=held["name"], generation=held["generation"])
        try:
            self.engines.each(
                lambda engine: engine.json("POST", "/update_weights_from_tensor", dict(kept=kept, **self.update.transaction(engine)), admin=True, retry=True)
            )
        except RefitError as error:
            errors = error.errors.values() if isinstance(error, EnginesFailed) else [error]
            if all(isinstance(one, RefitError) and (one.code == "NOT_FOUND" or one.code == "CONFLICT" or "has ended" in one.message) for one in errors):
                return False
            raise
        return True


def synchronize(bucket):
    """Kept memory has no event for the server to wait for."""
    tensor = bucket.flat if bucket.flat is not None else next(iter(bucket.tensors), None)
    if tensor is not None and tensor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(tensor.device)


class Broadcast(Transport):
    def __init__(self, update, infos):
        super().__init__(update, infos)
        self.flat = None
        self.ranks.first(lambda: update.group.join())

    def put(self, bucket, name, tensor):
        bucket.note(name, tensor)
        if self.ranks.rank == 0:
            bucket.flat = self.flat if bucket.flat is None else bucket.flat
            bucket.copy_in(tensor, self.update.group.device)
            self.flat = bucket.flat

    def post(self, bucket):
        about = dict(
            names=[entry[0] for entry in bucket.entries], dtypes=[dtype_name(entry[1]) for entry in bucket.entries],
            shapes=[list(entry[2]) for entry in bucket.entries], group_name=self.update.group.name, load_format="flattened_bucket",
        )  # fmt: skip

        def announce(engine):
            return engine.json("POST", "/update_weights_from_distributed", dict(about, **self.update.transaction(engine)), admin=True)

        self.update.group.broadcast(bucket.flat[: bucket.bytes], ask(self.engines.engines, announce))


TRANSPORTS = {"handles": Handles, "kept": Kept, "upload": Upload, "group": Broadcast, "file": File}


def ranks_behind(info):
    """Ranks of each engine behind a server: itself, unless it is a gateway."""
    if "engines" in info:
        return [engine["ranks"] for engine in info["engines"] if engine["state"] in ("ready", "stale")]
    return [info["tp_size"] * info.get("pp_size", 1)]


def is_local(host):
    """Whether an address is one of this machine: only those can be bound to."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        if ipaddress.ip_address(place[0].split("%")[0]).is_loopback:
            return True
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
        return True
    except OSError:
        return False


# --- process groups ---


class Group:
    """A torch process group beside the trainer's own: this process is rank 0, the ranks of the engines follow, in the order of the engines.

    backend: "nccl" (engines and trainer on different cards) or "gloo" (any engine); default: nccl if all engines are on cards. address: where
    engines reach this process; default: the one that reaches the first engine. port: 0 for a free one. timeout_s: how long anybody waits for the
    others. Used by one update at a time; on the trainer's ranks other than 0 it does nothing.
    join() is done by the first update, and again after a failure; leave() destroys it.
    """

    def __init__(self, engines, backend=None, address=None, port=0, name="weight_update_group", timeout_s=300):
        self.engines, self.backend, self.address, self.port, self.name = engines, backend, address, port, name
        self.timeout, self._group, self._server = datetime.timedelta(seconds=timeout_s), None, None

    @property
    def device(self):
        """Where a tensor has to be to be broadcast."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    def join(self):
        """All ranks at once; nothing where they have joined already.

        Raises RefitError where an engine refuses, and torch's own error where one does not come."""
        if self._group is not None:
            return
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        infos = self.engines.each(lambda engine: engine.server_info())
        self.backend = self.backend or ("nccl" if all(info.get("device") == "cuda" for info in infos.values()) else "gloo")
        offsets, world = {}, 1
        for engine, info in infos.items():
            offsets[engine] = world
            world += info["tp_size"] * info.get("pp_size", 1)
        first = self.engines.engines[0]
        self.address = self.address or address_towards(first.host, first.port)
        # The server does not wait for the others, and its client, which counts this rank, neither: whether an engine refuses is known at once.
        server = dist.TCPStore(self.address, self.port, world, True, self.timeout, wait_for_workers=False)
        place = dict(master_address=self.address, master_port=server.port, world_size=world, group_name=self.name, backend=self.backend)
        joining = ask(
            self.engines.engines, lambda engine: engine.json("POST", "/init_weights_update_group", dict(place, rank_offset=offsets[engine]), admin=True)
        )
        store = dist.TCPStore(self.address, server.port, world, False, self.timeout)
        if any(future.exception() is not None for future in wait(joining.values(), return_when=FIRST_EXCEPTION).done):
            # Those that wait for ranks which will not come are let go, and those that have been counted, or are now. A group of this name
            # that another engine has already is somebody's.
            for concerned in (lambda future: not future.done(), lambda future: future.exception() is None):
                engines = [engine for engine, future in joining.items() if concerned(future)]
                if engines:
                    with contextlib.suppress(RefitError):
                        self.tell_to_leave(engines)
                wait(joining.values())
        answers(joining)
        # torch's own way to a group that is not the default one has private names, here as everywhere. Its parameter for options has had several names.
        made = c10d._new_process_group_helper(
            world, 0, [], dist.Backend(self.backend), dist.PrefixStore(self.name, store), group_name=self.name, timeout=self.timeout
        )
        self._group, self._server = made[0] if isinstance(made, tuple) else made, server
        # Ranks of this group are what callers name in it: the engines have none in the trainer's default group.
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    def tell_to_leave(self, engines=None):
        answers(
            ask(engines or self.engines.engines, lambda engine: engine.json("POST", "/destroy_weights_update_group", dict(group_name=self.name), admin=True))
        )

    def broadcast(self, tensor, asked):
        """asked: {engine: future of its reply} to the announcement. Returns when all have answered."""
        import torch.distributed as dist

        try:
            work = dist.broadcast(tensor, 0, group=self._group, async_op=True)
            patience = None
            while not work.is_completed():
                # Whoever answers before it has received is not coming.
                if any(future.done() and future.exception() is not None for future in asked.values()):
                    patience = patience or time.monotonic() + 10
                if patience is not None and time.monotonic() > patience:
                    raise RefitError(0, "GROUP_BROKEN", "an engine left the broadcast")
                time.sleep(0.0005)
            work.wait()
        except Exception as error:
            self.drop()
            answers(asked)
            raise error if isinstance(error, RefitError) else RefitError(0, "GROUP_BROKEN", str(error)) from error
        answers(asked)

    def drop(self):
        """Leaves without a word: the group is of no use. The next join makes it anew."""
        import torch.distributed as dist

        group, self._group, self._server = self._group, None, None
        with contextlib.suppress(Exception):
            if self.backend == "nccl":
                group.abort()
            dist.destroy_process_group(group)
        with contextlib.suppress(RefitError):
            self.tell_to_leave()

    def leave(self):
        """Ends the group on all sides."""
        import torch.distributed as dist

        if self._group is None:
            return
        group, self._group = self._group, None
        try:
            self.tell_to_leave()
        finally:
            dist.destroy_process_group(group)
            self._server = None

    def __enter__(self):
        self.join()
        return self

    def __exit__(self, *_):
        self.leave()


def address_towards(host, port):
    """This machine's address on the way to a host; no packet is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]
