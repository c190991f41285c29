"""One engine or several: generation, control, memory, and updates of one request."""

import contextlib
import json
import os
import socket
import time
import urllib.parse
import uuid

from .adapters import AdapterLoad, adapter_path
from .bodies import FormBody, PathBody, SafetensorsBody
from .connection import Connection
from .errors import RefitError
from .fan_out import each
from .group import Group
from .shard_group import ShardGroup
from .shards import Announcements
from .update import Update


class Engines:
    """The methods that one client and several have in common. engines: a list of Client."""

    def each(self, call):
        """{engine: call(engine)}, in parallel."""
        return each(self.engines, call)

    def update(self, version=None, **options):
        """A context in which tensors are added; see Update for the options."""
        return Update(self, version, **options)

    def _add_adapter(self, name, adapter, **options):
        return AdapterLoad(self, name, adapter, **options).run()

    def group(self, **options):
        """A process group of this process and all ranks of the engines; see Group for the options."""
        return Group(self, **options)

    def shard_group(self, process_group=None, **options):
        """A process group of all ranks of the trainer and of the engines, for shards; see ShardGroup."""
        return ShardGroup(self, process_group, **options)

    @contextlib.contextmanager
    def paused(self, mode="retract"):
        """Pauses generation on all engines in the block, and continues it afterwards whatever happens."""
        try:
            self.pause(mode)
        except BaseException:
            # Some engines may be paused already.
            with contextlib.suppress(RefitError):
                self.resume()
            raise
        try:
            yield self
        finally:
            self.resume()


class Client(Engines, Connection):
    """One server (or a gateway), by its url, which may have a path.

    api_key, admin_key: bearer keys. The admin key (default: the API key) is for weights, memory, pause and abort.
    timeout: seconds without a byte after which a call fails; None waits for ever. Updates wait for running requests, so
    use minutes. retries: how often a repeatable call is repeated when no reply came.
    owner: a text that names who opens transactions. A trainer that restarts under the same text takes over the
    transaction that it left open.
    """

    def __init__(self, url, api_key=None, admin_key=None, timeout=None, retries=2, owner=None):
        super().__init__(url, api_key, admin_key, timeout, retries)
        self.owner = owner or f"refit.py {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self.engines = [self]
        self.kept, self.plans, self.announcements = {}, {}, Announcements()

    def at(self, url):
        """A client of another server, with the keys and options of this one."""
        return Client(url, self._api_key, self._admin_key, self.timeout, self.retries, self.owner)

    # state

    def health(self):
        """{"status": "ok" | "paused" | "torn" | "asleep" | ..., "weights": {...}, "weight_version": ...}.

        Does not fail while the process answers."""
        return self.json("GET", "/health")

    def ready(self):
        """Whether the engine generates."""
        try:
            self.call("GET", "/ready", retry=False)
        except RefitError as error:
            if error.status not in (0, 503):
                raise
            return False
        return True

    def wait_ready(self, timeout_s=600):
        """Waits until the engine generates. Raises TimeoutError."""
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
        """The engine's ranks in a process group or a list of handles: one for each GPU (or virtual rank)."""
        info = self.server_info()
        return info["tp_size"] * info.get("pp_size", 1)

    def version(self):
        """The label of the weights."""
        return self.json("GET", "/weight_version")["weight_version"]

    def set_version(self, version, abort_all_requests=False):
        body = dict(new_version=version, abort_all_requests=abort_all_requests)
        return self.json("POST", "/update_weight_version", body, admin=True, retry=True)

    def weights(self):
        """The state of the weights' bytes: {"state": "current"}, {"state": "torn", "tensors": [...], "reason": ...} or
        {"state": "asleep", "tags": [...]}."""
        return self.health()["weights"]

    def checksums(self):
        """{checkpoint name: 16 hex digits} of the weights that the engine holds (docs/checksum.md)."""
        return self.json("POST", "/weights_checker", dict(action="checksum"), admin=True, retry=True)["checksums"]

    def check_weights(self, action):
        """action: "snapshot", "reset_tensors" or "compare"."""
        return self.json("POST", "/weights_checker", dict(action=action), admin=True)

    # generation

    def generate(self, prompt, sampling_params=None, **fields):
        """One output, or a list when the prompt is a batch or n > 1: {"text", "output_ids", "meta_info"}.

        prompt: a text, token ids, or a list of either. fields: more fields of /generate (`return_logprob`, `rid`, ...).
        """
        return self.call("POST", "/generate", generate_body(prompt, sampling_params, fields, False))

    def stream(self, prompt, sampling_params=None, **fields):
        """Yields the output as it grows, each time with everything so far. Leaving the loop ends the request."""
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
                    code = error.get("refit_code") or "FAILED"
                    raise RefitError(error.get("code") or 0, code, error.get("message", ""), url=self.url)
                yield event
            raise RefitError(0, "NO_REPLY", "the stream broke off", url=self.url)

    def abort(self, rid=None):
        """Ends one request, or all."""
        body = dict(abort_all=True) if rid is None else dict(rid=rid)
        return self.call("POST", "/abort_request", body, admin=True, retry=True)

    def pause(self, mode="abort"):
        """mode: "abort" ends running requests with the tokens that they have, "retract" computes them again afterwards,
        "in_place" freezes them."""
        return self.call("POST", "/pause_generation", dict(mode=mode), admin=True, retry=True)

    def resume(self):
        return self.call("POST", "/continue_generation", {}, admin=True, retry=True)

    def flush(self, timeout_s=0):
        """Drops the prefix cache; waits at most timeout_s until the engine is idle. Raises RefitError 400 if it is
        not."""
        return self.call("POST", f"/flush_cache?timeout={timeout_s}", admin=True, retry=True)

    # finished samples

    def receipt(self, id, digest=True):
        """The receipt of a finished sample: ids, logprobs, seed, sampling parameters, versions, digest of the weights.

        id: `meta_info.id` of a sample that was generated with receipt=True. digest: compute the digest if it is not
        known yet, which reads the model once for each version."""
        return self.json("GET", f"/samples/{urllib.parse.quote(id, safe='')}?digest={str(digest).lower()}")

    def measure_truth(self, samples):
        """Compares the trainer's logprobs with the engine's: {"tokens", "mean", "max", "p99", "kl", "clipped", ...}.

        samples: [{"id", "logprobs"[, "output_ids"]}] of samples that were generated with return_logprob=True and
        receipt=True; lists or tensors."""
        lists = [
            {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}
            for sample in samples
        ]
        return self.json("POST", "/truth", dict(samples=lists))

    def truth(self):
        """All comparisons so far, and the last versions one by one."""
        return self.json("GET", "/truth")

    # memory

    def release_memory(self, tags=None):
        """tags: "weights", "kv_cache", "cuda_graph"; None: all. Never repeated: released memory cannot be released
        again."""
        return self.call("POST", "/release_memory_occupation", dict(tags=tags), admin=True)

    def resume_memory(self, tags=None):
        """Weights come back torn, unless the server keeps a copy: write them before anything generates."""
        return self.call("POST", "/resume_memory_occupation", dict(tags=tags), admin=True)

    # LoRA adapters

    def add_adapter(self, name, adapter, **options):
        """Loads a LoRA adapter, or its next version under the same name, while the engine generates. Running requests
        stay on the version that they began with. Requests choose it by name: generate(..., lora_path=name).

        adapter: a PEFT model (adapter_name: which of its adapters; default: the active one), a folder that PEFT has
        saved, or (config, tensors): the configuration as PEFT's object or a dict, and tensors by PEFT's names.
        transport: "handles", "kept", "upload", "group", "file", or "auto", as for updates; a folder is uploaded by
        default, and with "file" the server reads it itself. "kept": adapters of the same names, dtypes and shapes share
        the kept memory; release_kept() gives it back. group, folder, process_group, dtype: as for updates.
        replace: whether a name that is loaded already gets the new version; otherwise RefitError CONFLICT.
        pinned: keep it in its slot. verify: compute the engine's digest here too, and compare.

        Returns the report: {"name", "version", "digest", "rank", "missing", "is_zero", "warnings", ...}. After an error
        the old version stays, except for BAD_REPLY: the engine then has loaded something else than was sent."""
        return self._add_adapter(name, adapter, **options)[self]

    def unload_adapter(self, name, in_use="finish"):
        """in_use: while requests use it, they finish and this returns at once ("finish"), this returns when they have
        finished ("wait"), or it is refused ("refuse")."""
        return self.json("DELETE", f"{adapter_path(name)}?in_use={in_use}", admin=True)

    def adapters(self):
        """The versions that names of adapters stand for: [{"name", "version", "digest", "requests", ...}]."""
        return self.json("GET", "/adapters")["adapters"]

    def updates(self):
        """The last 100 updates of weights and of adapters, the newest first: [{"id", "outcome", "ms", "bytes",
        "stall_ms", ...}]. Times are in milliseconds, "started_at" in seconds since 1970."""
        return self.json("GET", "/updates")["updates"]

    def update_trace(self, update_id):
        """The phases of an update in Chrome's trace event format, in microseconds: save it as JSON and open it in
        https://ui.perfetto.dev. RefitError 404 for an id that GET /updates does not list."""
        return self.json("GET", f"/updates/{urllib.parse.quote(update_id, safe='')}/trace.json")

    # whole updates of one request

    def update_from_disk(self, path, version=None, **fields):
        """path: a folder, a safetensors file or an index that the server sees, inside its --model-root."""
        body = dict(model_path=str(path), weight_version=version, **fields)
        return self.json("POST", "/update_weights_from_disk", body, admin=True, retry=True)

    def upload(self, *files, version=None, **fields):
        """Sends safetensors: paths, or lists of (name, tensor). One file is sent as it is (application/octet-stream),
        several as a form. Either is one update."""
        fields = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in dict(fields, weight_version=version).items()
            if value is not None
        }
        bodies = [PathBody(file) if isinstance(file, (str, os.PathLike)) else SafetensorsBody(file) for file in files]
        path, kind = "/update_weights_from_tensor", "application/octet-stream"
        if len(bodies) == 1:
            path, body = path + "?" + urllib.parse.urlencode(fields), bodies[0]
        else:
            body = FormBody(fields, bodies)
            kind = f"multipart/form-data; boundary={body.boundary}"
        headers = {"content-type": kind}
        return self.json("POST", path, body.parts, length=body.length, headers=headers, admin=True, retry=True)

    def update_from_tensors(self, entries, **fields):
        """entries: handles, as base64 of pickles, one for each rank or one for all."""
        body = dict(serialized_named_tensors=entries, **fields)
        return self.json("POST", "/update_weights_from_tensor", body, admin=True)

    def release_kept(self, name=None):
        """The server closes the memory that it keeps open (`transport="kept"`), under one name or all."""
        self.kept.clear()
        return self.json("POST", "/release_kept_tensors", dict(name=name), admin=True, retry=True)["released"]


class Clients(Engines):
    """Several engines that get the same weights.

    Control calls go to all engines at once and return {engine: reply}. For generation use one of `engines`, or a
    gateway.
    """

    def __init__(self, urls, **options):
        self.engines = [url if isinstance(url, Client) else Client(url, **options) for url in urls]
        if not self.engines:
            raise ValueError("urls: expected at least one, got none")


    def add_adapter(self, name, adapter, **options):
        """Client.add_adapter on all engines: {engine: report}. Raises EnginesFailed; engines that did not fail have the
        new version."""
        return self._add_adapter(name, adapter, **options)


def _on_all(name):
    def method(self, *args, **options):
        return self.each(lambda engine: getattr(engine, name)(*args, **options))

    method.__name__ = name
    method.__doc__ = f"Client.{name} on all engines: {{engine: result}}. Raises EnginesFailed."
    return method


for _name in """health ready wait_ready server_info version set_version weights checksums check_weights abort pause
        resume flush release_memory resume_memory update_from_disk upload release_kept unload_adapter
        adapters""".split():
    setattr(Clients, _name, _on_all(_name))


def generate_body(prompt, sampling_params, fields, stream):
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    text = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], str))
    key = "text" if text else "input_ids"
    return {key: prompt, "sampling_params": sampling_params or {}, **fields, "stream": stream}
