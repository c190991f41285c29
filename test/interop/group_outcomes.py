"""Checks of an engine after a fault of its process group."""

import json
import re

import pytest

from server import Refused


def state_of(server, old, new):
    """The state of the weights: "old", "new" or "torn".

    Fails if a tensor is neither old nor new and not named as torn.
    """
    got = server.checksums()
    health = server.get("/health")
    if server.metric("refit:weights_torn") == 0:
        assert got in (old, new), "weights that are neither old nor new, and not called torn"
        return "old" if got == old else "new"
    with pytest.raises(Refused) as refused:
        server.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert refused.value.status == 503
    torn = health["weights"]["tensors"]
    assert torn and len(torn) <= health["weights"]["torn_count"]
    if len(torn) == health["weights"]["torn_count"]:
        mixed = [name for name in old if name not in torn and got.get(name) not in (old[name], new[name])]
        assert not mixed, f"neither old nor new, and not called torn: {mixed[:5]}"
    return "torn"


def words_of(refusal, *expected):
    """Checks that the refusal's message has the elapsed time and every expected part."""
    assert isinstance(refusal, Refused), refusal
    message = json.loads(refusal.body)["message"]
    assert re.search(r"\d+(\.\d+)? ?(ms|s)\b", message), f"no elapsed time in: {message}"
    for word in expected:
        assert word in message, f"{word} is not in: {message}"
    return message


def heals(party, kind, layout, name, port, variant, *flags):
    """Checks that the next attempt with the same name and port succeeds."""
    group = party.group(kind, layout, *flags, name=name, port=port)
    group.join()
    group.update(variant).ok()
    party.holds(group, kind, variant)
    group.leave()
    group.close()
