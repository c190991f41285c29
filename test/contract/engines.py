"""Shared servers of a small model, by device and ranks, and position-coded weights for them."""

import contextlib
import threading

import pytest

import models
from server import ROOT, Refused, Server, settled
from tensors import coded, coded_checksum

GOLDENS = ROOT / "test/goldens"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cards(1))]


class Engine(Server):
    """A server, the tensors of its model, and checks of its weights."""

    def __init__(self, kind, ranks, device, *flags, env=None):
        self.kind, self.ranks, self.device = kind, ranks, device
        self.shapes = {name: entry[2] for name, entry in models.headers(GOLDENS / kind).items()}
        own = ["--dtype", "bfloat16", "--threads", 2] if device == "cpu" else []
        super().__init__(
            GOLDENS / kind,
            "--device",
            device,
            "--tp",
            ranks,
            "--max-total-tokens",
            1024,
            "--skip-tokenizer-init",
            *own,
            *flags,
            env=env,
        )

    def tensors(self, variant, device=None):
        return [(name, coded(variant, name, shape).to(device or "cpu")) for name, shape in self.shapes.items()]

    def wanted(self, variant):
        return {name: coded_checksum(variant, name, tuple(shape)) for name, shape in self.shapes.items()}

    def holds(self, variant, names=None):
        """Checks that it holds a variant, or the named tensors of it, bit for bit on every rank."""
        wanted, got = self.wanted(variant), self.checksums()
        wrong = [name for name in names or wanted if got.get(name) != wanted[name]]
        assert not wrong, f"{len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}"

    def spoil(self):
        self.post("/weights_checker", dict(action="reset_tensors"))

    def version(self):
        return self.get("/get_weight_version")["weight_version"]

    def tokens(self, count=4, **fields):
        return self.post(
            "/generate",
            dict(
                input_ids=[5, 6, 7],
                sampling_params=dict(max_new_tokens=count, ignore_eos=True, temperature=0),
                return_logprob=True,
                **fields,
            ),
        )


class Engines:
    make = Engine

    def __init__(self):
        self.made = {}

    def __call__(self, kind="qwen3", ranks=1, device="cpu", *flags, which="a", env=None):
        key = (kind, ranks, device, which, flags)
        if key not in self.made or self.made[key].process.poll() is not None:
            self.made[key] = self.make(kind, ranks, device, *flags, env=env)
        return self.made[key]

    def close(self):
        made, self.made = self.made, {}
        for engine in made.values():
            if engine.process.poll() is None:
                engine.stop()


class Beside:
    """A function that runs in a thread beside the test; `result()` returns or raises its outcome."""

    def __init__(self, run):
        self.outcome, self.error = None, None
        self.thread = threading.Thread(target=self.work, args=(run,), daemon=True)
        self.thread.start()

    def work(self, run):
        try:
            self.outcome = run()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    @property
    def done(self):
        return not self.thread.is_alive()

    def result(self, limit_s=180):
        self.thread.join(limit_s)
        assert self.done, f"it has not ended within {limit_s} s"
        if self.error is not None:
            raise self.error
        return self.outcome


@contextlib.contextmanager
def refusal(status=None):
    """Expects that the body of a `with` is refused. Yields a dict that has the refusal once the body has ended."""
    found = {}
    try:
        yield found
    except Refused as error:
        assert status is None or error.status == status, str(error)
        found.update(status=error.status, body=error.body)
        return
    raise AssertionError("it was not refused")


__all__ = ["DEVICES", "GOLDENS", "Beside", "Engine", "Engines", "Refused", "refusal", "settled"]
