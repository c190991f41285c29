"""A gateway in front of engines that looks like one engine, so the same trainer tests run against a fleet."""

import pytest

from engines import Engine, Engines
from server import Server


class Fleet(Server):
    """Two engines with so many ranks each, and their gateway.

    Replies are those that a trainer sees: `engines`, which must name both, is checked and removed.
    """

    def __init__(self, kind, ranks, device, *flags, env=None, count=2):
        self.engines = []
        try:
            self.engines = [Engine(kind, ranks, device, *flags, env=env) for _ in range(count)]
            self.kind, self.device, self.shapes, self.ranks = kind, device, self.engines[0].shapes, count * ranks
            super().__init__(None, "--health-interval", 0.2)
        except BaseException:
            for engine in self.engines:
                engine.kill()
            raise

    def arguments(self, model):
        return ["gateway", *(word for engine in self.engines for word in ("--engine", engine.url))]

    def request(self, method, path, body=None, timeout=300):
        reply = super().request(method, path, body, timeout)
        # A reply of one engine on behalf of all has no such field.
        if isinstance(reply, dict) and isinstance(reply.get("engines"), dict):
            assert sorted(reply.pop("engines")) == sorted(engine.url for engine in self.engines)
        return reply

    def stop(self):
        super().stop()
        for engine in self.engines:
            engine.stop()

    def kill(self):
        super().kill()
        for engine in self.engines:
            if engine.process.poll() is None:
                engine.kill()

    tensors, wanted, version, spoil = Engine.tensors, Engine.wanted, Engine.version, Engine.spoil

    def holds(self, variant, names=None):
        for engine in self.engines:
            engine.holds(variant, names)


class Fleets(Engines):
    make = Fleet


@pytest.fixture(scope="module")
def fleets():
    made = Fleets()
    yield made
    made.close()


__all__ = ["Fleet", "Fleets", "fleets"]
