"""The HTTP routes of the released vLLM and SGLang servers, read out of their sources."""

import ast
import re

import released

METHODS = ("get", "post", "put", "delete", "head", "websocket")
SOURCES = {"vLLM": ("vllm", "vllm/entrypoints"), "SGLang": ("sglang", "sglang/srt/entrypoints")}
# Servers beside the one that generates: their own processes, on other ports.
OTHER_SERVERS = re.compile(r"cli/preload|dp_supervisor|engine_info_bootstrap_server|offline_docs")


def text_of(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def of_call(call):
    """The (method, path) pairs of `@app.post("/path")`, `app.api_route(...)` and `app.add_api_route(...)`."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return []
    path, name = text_of(call.args[0]), call.func.attr
    if path is None or not path.startswith("/"):
        return []
    if name in METHODS:
        return [(name.upper(), path)]
    listed = [keyword.value for keyword in call.keywords if keyword.arg == "methods"]
    if name not in ("api_route", "add_api_route") or not listed:
        return []
    return [(text_of(method), path) for method in listed[0].elts]


def routes(server):
    wheel, folder = SOURCES[server]
    found = set()
    for file in (released.folder_of(wheel) / folder).rglob("*.py"):
        if not OTHER_SERVERS.search(str(file)):
            for node in ast.walk(ast.parse(file.read_text())):
                found.update(of_call(node))
    return found
