"""Shared by the tests of clients/python/refit: the module, the transports, and the check of what has arrived."""

import sys

from tensors import ROOT

sys.path.insert(0, str(ROOT / "clients/python"))
import refit  # noqa: E402

WAYS = ["handles", "handles in place", "kept", "kept in place", "upload", "group", "file"]


def options_of(way, engines, folder):
    """The options of an update by a transport, and its group or None."""
    transport, _, place = way.partition(" ")
    group = engines.group(backend="gloo", timeout_s=60) if transport == "group" else None
    own = dict(group=group) if group else dict(folder=folder) if transport == "file" else {}
    return dict(transport=transport, in_place=place != "", **own), group


def brought(engine, model, variant):
    assert engine.checksums() == model.checksums(variant)
    assert engine.weights() == {"state": "current"}


__all__ = ["WAYS", "brought", "options_of", "refit"]
