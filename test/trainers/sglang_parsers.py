"""SGLang's parsers of tool calls, from its released wheel. Its protocol, which imports a server, has stand-ins."""

import json
import sys
import types
from typing import Any

from pydantic import BaseModel

import released


class Function(BaseModel):
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    strict: bool = False


class Tool(BaseModel):
    type: str = "function"
    function: Function


class Unused(types.ModuleType):
    """A module of which parsers import names that none of these texts needs."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        # Subclasses take options of msgspec.
        return type(name, (), {"__init_subclass__": classmethod(lambda cls, **_: None)})


def load():
    released.bare("sglang", *("sglang", "sglang.srt", "sglang.srt.function_call", "sglang.srt.parser"))
    released.bare("sglang", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
    for name in ("msgspec", "xgrammar", "xgrammar.structural_tag", "sglang.srt.entrypoints.openai.protocol"):
        sys.modules[name] = Unused(name)
    sys.modules["sglang.srt.entrypoints.openai.protocol"].__dict__.update(Tool=Tool, Function=Function)
    dumps = lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()  # noqa: E731
    released.replace("orjson", loads=json.loads, dumps=dumps, JSONDecodeError=json.JSONDecodeError)
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return FunctionCallParser, ReasoningParser


FunctionCallParser, ReasoningParser = load()


def parser(name, tools):
    return FunctionCallParser([Tool(**tool) for tool in tools], name)


def whole(name, tools, text):
    content, calls = parser(name, tools).parse_non_stream(text)
    return content, [(call.name, call.parameters) for call in calls]


def streamed(name, tools, pieces):
    """The joined deltas."""
    of = parser(name, tools)
    parts = [*map(of.parse_stream_chunk, pieces), of.parse_stream_end()]
    calls = {}
    for call in (call for _, found in parts for call in found):
        made = calls.setdefault(call.tool_index, ["", ""])
        made[0] += call.name or ""
        made[1] += call.parameters
    return "".join(text for text, _ in parts), [tuple(call) for _, call in sorted(calls.items())]


def reasoning(name, text):
    """(reasoning, content)."""
    reasoning, content = ReasoningParser(name).parse_non_stream(text)
    return reasoning or "", content or ""
