"""The routes of the released vLLM and SGLang servers: refit serves each, or its table of refused routes has it."""

import json
import re

import pytest

import released
import released_routes


def same(path):
    """Names of parameters do not matter."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def served():
    document = json.loads((released.ROOT / "openapi/openapi.json").read_text())
    return {(method.upper(), same(path)) for path, methods in document["paths"].items() for method in methods}


def refused():
    lines = (released.ROOT / "docs/compatibility.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    cells = [route.split() for line in table for route in re.findall(r"`([A-Z ]+ /[^`]*)`", line)]
    return {(method, same(path)) for *methods, path in cells for method in methods}


def known(method, path, routes):
    # A HEAD is answered by every GET; a socket begins as a GET.
    return ({"HEAD": "GET", "WEBSOCKET": "GET"}.get(method, method), same(path)) in routes


@pytest.mark.parametrize("server", released_routes.SOURCES)
def test_every_route_is_served_or_refused_in_the_table(server):
    found = released_routes.routes(server)
    assert len(found) > 60, "the sources have moved"
    ours = served() | refused()
    assert sorted(route for route in found if not known(*route, ours)) == []


def test_no_route_is_served_and_refused():
    assert sorted(served() & refused()) == []


def test_no_refused_route_is_forgotten_by_its_owner():
    """A route that neither server has any more leaves the table."""
    found = [route for server in released_routes.SOURCES for route in released_routes.routes(server)]
    theirs = {("GET" if method == "WEBSOCKET" else method, same(path)) for method, path in found}
    assert sorted(refused() - theirs) == []
